"""Entry point of the ``posttrain`` command: a signal before the first step ends it, at any line, without a traceback."""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

from posttrain.cli.streams import keep_streams
from posttrain.errors import RunInterrupted
from posttrain.run.early_stop import AT_ONCE, StoppedEarly, heed_signals, put_off

# Commands that save what they have done, so that a scheduler's signal means: stop, and start again later.
RESUMABLE = ("train", "sft", "tune", "demo")
# Commands that make few objects and are soon over: the collector would take a tenth of their time and find nothing.
SHORT = ("plan", "translate", "keys", "algorithms", "schema", "version")
ALLOCATIONS_PER_COLLECTION = 200_000


def main() -> None:
    """Import the commands and run the requested one."""
    keep_streams()
    # Until the commands are imported the system ends the process: there is nothing to tidy up yet
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        command = sys.argv[1] if len(sys.argv) > 1 else ""
        if command in RESUMABLE:
            heed_signals()
        gc.disable()  # imports leave no garbage
        from posttrain.cli.app import main as run

        if command in SHORT:
            gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
        gc.enable()
        signal.signal(signal.SIGINT, interrupt if before is signal.default_int_handler else before)
        run()
    except StoppedEarly as stopped:
        print(f"posttrain: {stopped}", file=sys.stderr)
        sys.exit(RunInterrupted.exit_code)
    except KeyboardInterrupt:  # one that reached no command: typer was still building them, or had ended
        print("posttrain: stopped at once", file=sys.stderr)
        sys.exit(AT_ONCE)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or have the signal sent again where that would be lost."""
    if not put_off(number, frame):
        raise KeyboardInterrupt
