"""Copies of a run's checkpoints elsewhere, made while the run continues. They never stop it: a failure is reported, and
tried again after the next save."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from posttrain.errors import Problem, RequestError
from posttrain.libraries.remote import RemoteFolder, plain
from posttrain.run.remote import checkpoints_in, discard, metric_of, reason, upload
from posttrain.run.retention import Retention, surplus

OWNER = "run"  # the file that says which run writes there


class Uploads:
    """Uploads of one run.

    Args:
        url: the folder elsewhere, or on another disk; local: the folder of the run's checkpoints.
        rules: which of those that are there stay there.
        run: id of the run; two runs must not write (and delete) in one folder.
        say: tells people. It is called by a thread of its own.
    """

    def __init__(self, url: str, local: Path, rules: Retention, run: str, say: Callable[[str], None]):
        self.url = plain(url)
        self._local = local
        self._rules = rules
        self._run = run
        self._say = say
        self._lock = threading.Condition()
        self._waiting: list[str] = []  # names, oldest first
        self._current: str | None = None
        self._failed = False
        self._mine = False
        self._thread: threading.Thread | None = None

    def claim(self, origin: str | None) -> None:
        """Make the folder this run's. ``origin`` is where the run started from: a run may resume from the folder that
        it copies to.

        Raises: RequestError when another run writes there. A folder that cannot be reached is reported, and tried again later.
        """
        try:
            self._claim(take_over=origin is not None and (plain(origin) + "/").startswith(self.url + "/"))
        except RequestError:
            raise
        except Exception as error:  # noqa: BLE001  # each protocol's library has errors of its own
            self._say(
                f"{self.url} cannot be reached now ({reason(error)}); the run continues, and tries after the next save"
            )

    def begin(self, name: str) -> None:
        """Upload a checkpoint in the background, and what failed before."""
        with self._lock:
            if name not in self._waiting and name != self._current:
                self._waiting.append(name)
            self._failed = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def reads(self, name: str) -> bool:
        """True while a checkpoint is being read, so that it must not be deleted."""
        return self._current == name

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is there. What is not by then, or has failed, is said; the next start uploads the newest."""
        with self._lock:
            self._lock.wait_for(lambda: self._thread is None, timeout=deadline_s)
            left = [*([self._current] if self._current else []), *self._waiting]
        if left:
            why = "failed" if self._thread is None else f"took longer than {deadline_s:g} s"
            self._say(
                f"not uploaded to {self.url}, because it {why}: {', '.join(left)}; start the run again to upload it"
            )

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._failed:
                    self._thread = None
                    self._lock.notify_all()
                    return
                name = self._current = self._waiting.pop(0)
            error = self._upload(name)
            with self._lock:
                self._current = None
                if error is not None:
                    self._failed = True
                    self._waiting.insert(0, name)

    def _upload(self, name: str) -> str | None:
        """Returns why it failed, None when it did not."""
        if not (self._local / name).is_dir():
            self._say(f"{name} was deleted here before it could be uploaded to {self.url}")
            return None
        try:
            self._claim()
            folder = RemoteFolder(self.url)
            upload(folder, self._local / name)
            self._say(f"uploaded {name} to {self.url}")
            self._drop_surplus(folder, int(name.rpartition("_")[2]))
        except Exception as error:  # noqa: BLE001  # each protocol's library has errors of its own; none may end the run
            self._say(
                f"the upload of {name} to {self.url} failed: {reason(error)}; it is tried again after the next save"
            )
            return reason(error)
        return None

    def _claim(self, take_over: bool = False) -> None:
        if self._mine:
            return
        folder = RemoteFolder(self.url)
        owner = folder.read(OWNER)
        about = json.dumps({"id": self._run}).encode()
        if owner != about and not take_over and any(one.complete for one in checkpoints_in(folder)):
            what = f"{self.url} holds checkpoints of another run, and this one would delete them"
            fix = f"name another folder, or go on from that run with run.resume_path={self.url}"
            raise RequestError(Problem(what, fix=fix, field="checkpoint.upload"))
        if owner != about:
            folder.write(OWNER, about)
        self._mine = True

    def _drop_surplus(self, folder: RemoteFolder, step: int) -> None:
        """Delete there what nothing keeps, and parts that were left by uploads that broke off. Later ones than this step are
        of a course that was left, and are never deleted."""
        there = [one for one in checkpoints_in(folder) if one.step <= step]
        whole = {one.step: metric_of(folder, one) if self._rules.best else None for one in there if one.complete}
        going = {*surplus(whole, self._rules)} | {one.step for one in there if not one.complete}
        for one in there:
            if one.step in going:
                discard(folder, one)
