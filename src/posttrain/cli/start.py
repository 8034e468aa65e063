"""Where the ``posttrain`` command begins: Ctrl-C while it is still importing ends it without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Import the commands and run the one that is asked for."""
    before = signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # the system ends the process; there is nothing to tidy up yet
    from posttrain.cli.app import main as run

    signal.signal(signal.SIGINT, before)
    run()
