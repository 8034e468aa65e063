"""A checkpoint that is written while the run continues."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from posttrain.run.early_stop import AT_ONCE


class SaveGivenUp(Exception):
    """A save that is not wanted any more: it stays unfinished, and the next start removes it."""


class BackgroundSave:
    """One save at a time, in a thread of its own. Its errors are raised where it is waited for.

    No pool: one would hold up the end of the process until its work is done.
    """

    def __init__(self) -> None:
        self._result: Future[str] | None = None
        self._given_up = threading.Event()

    @property
    def under_way(self) -> bool:
        """True if a save was begun and not waited for."""
        return self._result is not None

    def begin(self, save: Callable[[Callable[[], None]], str]) -> None:
        """Run ``save``; it calls the function that it is given wherever it can be given up. The one before must be done."""
        assert self._result is None, "one save at a time"
        result = self._result = Future[str]()

        def work() -> None:
            try:
                result.set_result(save(self._go_on))
            except BaseException as error:  # noqa: BLE001  # raised again where the save is waited for
                result.set_exception(error)

        threading.Thread(target=work, name="checkpoint", daemon=True).start()

    def wait(self) -> str | None:
        """The result of the save under way; None without one. Raises: what it raised."""
        if self._result is None:
            return None
        try:
            return self._result.result()
        finally:
            if self._result.done():  # not where a signal has ended the waiting
                self._result = None

    def give_up(self) -> None:
        """The process is about to end, at once. A save under way leaves nothing that looks like a checkpoint."""
        if self._result is not None:
            self._given_up.set()
            atexit.register(_leave_unless, self._result)

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise SaveGivenUp


def _leave_unless(done: Future[str]) -> None:
    """Python's own end would break a thread off in the middle of compiled code, which aborts the process."""
    if not done.done():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(AT_ONCE)
