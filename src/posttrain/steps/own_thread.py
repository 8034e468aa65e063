"""Work that goes on in a thread of its own, which alone touches its state: others ask the thread to do something for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar

from posttrain.errors import RunStopped

T = TypeVar("T")
PAUSE_S = 0.05  # between two looks at the questions while the work pauses


class OwnThread:
    """Calls ``work`` again and again. An error ends it, and is raised for whoever asks.

    Args: name of the thread, for messages; work, which returns within a fraction of a second; timeout_s for the answers.
    """

    def __init__(self, name: str, work: Callable[[], None], timeout_s: float):
        self._name, self._work, self._timeout_s = name, work, timeout_s
        self._questions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._paused = self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start; again is a no-op."""
        if not self._thread.is_alive() and not self._over:
            self._thread.start()

    def ask(self, do: Callable[[], T], waiting_for: Callable[[], str] = lambda: "") -> T:
        """Have something done between two pieces of work. Returns its result, and raises its error.

        Raises: the error that has ended the work; RunStopped when there is no answer in time. ``waiting_for`` is called for its
        message.
        """
        self._raise_error()
        if not self._thread.is_alive():
            return do()  # not started yet, or over
        answer = Future[T]()
        self._questions.put((answer, do))
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                return answer.result(PAUSE_S)
            except Late:
                if answer.done():  # it came just now, or is a TimeoutError of what was done
                    return answer.result()
                self._raise_error()
                if time.monotonic() > until:
                    told = f": it waits for {waiting_for()}" if waiting_for() else ""
                    raise RunStopped(f"{self._name} gave no answer within {self._timeout_s:g} s{told}") from None

    def pause(self, ready: Callable[[], bool], waiting_for: Callable[[], str]) -> None:
        """Have the work stop once ``ready``, which is called between its pieces, returns True; ``go`` continues it.

        Raises: as ``ask``.
        """
        until = time.monotonic() + self._timeout_s

        def stop() -> bool:
            self._paused = self._paused or ready()
            return self._paused

        while not self.ask(stop, waiting_for):
            if time.monotonic() > until:
                raise RunStopped(f"{self._name} did not come to rest within {self._timeout_s:g} s: {waiting_for()}")

    def go(self) -> None:
        """Continue after a pause."""
        self._paused = False

    def stop(self) -> None:
        """End the thread after the piece of work that it is at."""
        self._over = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self._timeout_s)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over:
                self._answer()
                if not self._paused:
                    self._work()
            self._answer()
        except BaseException as error:  # noqa: BLE001  # raised again for whoever asks
            self._error = error

    def _answer(self) -> None:
        """Answer the questions that wait; in a pause, wait for the next one."""
        while True:
            try:
                answer, do = self._questions.get(timeout=PAUSE_S) if self._paused else self._questions.get_nowait()
            except queue.Empty:
                return
            try:
                answer.set_result(do())
            except BaseException as error:  # noqa: BLE001  # its asker gets it
                answer.set_exception(error)
