"""A worker: one process with one rank of some roles. Its work is done in one thread; another answers how it is."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from operator import attrgetter
from typing import Any

from numpy.typing import NDArray

from posttrain import errors
from posttrain.backends.runtime.ray.packed import Keep, Packed
from posttrain.backends.runtime.ray.processes import WorkerProcess, read_log
from posttrain.errors import PosttrainError, Problem, RequestError, RunStopped
from posttrain.libraries.importing import importing
from posttrain.processes import proc
from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Trajectory

# Finished: the driver's number of the call and the prompt's number in it, and the responses.
Groups = list[tuple[tuple[int, int], tuple[Trajectory, ...]]]


@dataclass(frozen=True, slots=True)
class FinishedGroups:
    """Groups as one record, which is packed on its way to the driver."""

    numbers: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    responses: tuple[Trajectory, ...]

    @classmethod
    def of(cls, groups: Groups) -> FinishedGroups:
        responses = tuple(each for _, trajectories in groups for each in trajectories)
        return cls(tuple(number for number, _ in groups), tuple(len(each) for _, each in groups), responses)

    def each(self) -> Groups:
        responses = iter(self.responses)
        return [(number, tuple(islice(responses, size))) for number, size in zip(self.numbers, self.sizes, strict=True)]


PackedGroups = Packed[FinishedGroups]
# Prompts to sample for: their numbers in the call, names, token ids and images (() where no prompt has any), as columns, which
# cross in a tenth of the time of records
AskedPrompts = tuple[Sequence[int], Sequence[str], Sequence[tuple[int, ...]], Sequence[PromptImages | None]]


def asked_prompts(numbers: Sequence[int], prompts: Sequence[Prompt]) -> AskedPrompts:
    """Reduce prompts to all that a sampler needs."""
    images = [each.images for each in prompts]
    names, token_ids = [each.prompt_id for each in prompts], [each.token_ids for each in prompts]
    return numbers, names, token_ids, images if any(images) else ()


def prompts_of(asked: AskedPrompts) -> list[tuple[int, Prompt]]:
    """The prompts, each with its number."""
    numbers, names, token_ids, images = asked
    return [
        (n, Prompt(prompt_id=name, token_ids=ids, text="", data_source="", images=shown))
        for n, name, ids, shown in zip(numbers, names, token_ids, images or [None] * len(numbers), strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Events of a worker since the previous query."""

    lines: list[str]  # that it printed
    tokens: int  # that it sampled
    sequences: int  # that it learned
    groups: PackedGroups
    notices: list[str]  # for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error of a worker, in plain values."""

    kind: str  # name of a class of posttrain.errors; "" for an unexpected error
    text: str
    problems: tuple[Problem, ...] = ()

    def error(self, worker: str) -> Exception:
        """The error again, here."""
        if self.kind:
            known: type[PosttrainError] = getattr(errors, self.kind)
            return known(list(self.problems)) if issubclass(known, RequestError) else known(self.text)
        return RuntimeError(f"{worker} failed:\n{self.text}")


class GivenUp(Exception):
    """The driver has left the step; what was to be done for it is not needed."""


@dataclass(slots=True)
class Outbox:
    """Results waiting for the next query. Filled by the working thread, emptied by the answering one."""

    tokens: int = 0
    sequences: int = 0
    groups: Groups = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    # Puts the tokens of groups into the object store, from which they vanish with this process; None: they travel beside
    keep: Keep | None = None
    given_up: bool = False  # the samples in progress are no longer needed
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_tokens(self, count: int) -> None:
        """Raises: GivenUp, in the middle of sampling, when the samples are no longer needed."""
        if self.given_up:
            raise GivenUp
        with self.lock:
            self.tokens += count

    def add_sequences(self, count: int) -> None:
        with self.lock:
            self.sequences += count

    def add_group(self, number: tuple[int, int], responses: tuple[Trajectory, ...]) -> None:
        with self.lock:
            self.groups.append((number, responses))

    def add_notices(self, texts: list[str]) -> None:
        with self.lock:
            self.notices += texts

    def take_groups(self) -> PackedGroups:
        with self.lock:
            found, self.groups = self.groups, []
        return self._packed(found)

    def take(self) -> tuple[int, PackedGroups, list[str], int]:
        with self.lock:
            tokens, sequences, groups, notices = self.tokens, self.sequences, self.groups, self.notices
            self.tokens, self.sequences, self.groups, self.notices = 0, 0, [], []
        try:
            packed = self._packed(groups)
        except RunStopped:  # the store is full: the call that samples ends with these groups, and with the same error
            with self.lock:
                self.groups = groups + self.groups
            packed = PackedGroups.of(FinishedGroups.of([]))
        return tokens, packed, notices, sequences

    def _packed(self, groups: Groups) -> PackedGroups:
        return self.packed(FinishedGroups.of(groups))

    def packed(self, message: Any) -> Packed[Any]:
        """Pack a record with responses (see Packed), with their tokens in the store or beside it."""
        return Packed.of(message, self.keep) if self.keep else Packed.with_beside(message)


class Worker:
    """Hosts an object whose methods are called by name. ``call`` and ``news`` are called at the same time."""

    def __init__(self, name: str, node: str, host: str):
        self._node = node
        self._host = host
        self.outbox = Outbox()
        # Libraries keep settings by thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix=f"{name} aside")
        self._hosted: Any = None
        handle, self._log = tempfile.mkstemp(prefix="posttrain-worker-", suffix=".log")
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(handle, 1)  # a file, not a pipe: what was printed is still there after SIGKILL
        os.dup2(handle, 2)
        os.close(handle)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable()
        self._read = 0

    def about(self) -> WorkerProcess:
        begun = proc.started(os.getpid())
        assert begun is not None
        return WorkerProcess(pid=os.getpid(), started=begun, node=self._node, host=self._host, log=self._log)

    def free_port(self) -> int:
        """Return a free port of this node, for torch.distributed."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def devices(self) -> str:
        """Return the devices that Ray has given to this process, as in CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def begin(self, make: str, *arguments: Any) -> Failure | None:
        """Make the hosted object, ``make(outbox, *arguments)``. Args: make is "module:function", imported now."""

        def work() -> None:
            module, _, name = make.partition(":")
            with importing():
                function = getattr(import_module(module), name)
            self._hosted = function(self.outbox, *arguments)

        return self._guarded(self._thread, work)

    def call(self, method: str, wanted: bool, *arguments: Any) -> Any:
        """``hosted.method(*arguments)``, where the method's name may be a path ("sender.begin"); its result, None where it is not
        ``wanted``, or a Failure."""

        def work() -> Any:
            result = attrgetter(method)(self._hosted)(*arguments)
            return result if wanted else None

        return self._guarded(self._thread, work)

    def call_beside(self, method: str, *arguments: Any) -> tuple[Any, tuple[NDArray[Any], ...]]:
        """The result of a method that may return responses, or a Failure, and the arrays beside it: two values for the driver,
        which keeps the second where it lies."""
        result = self.call(method, True, *arguments)
        return result.parted() if isinstance(result, Packed) else (result, ())

    def call_aside(self, method: str, *arguments: Any) -> Any:
        """The same beside other work, for what needs no other rank."""
        return self._guarded(self._aside, lambda: attrgetter(method)(self._hosted)(*arguments))

    def give_up(self) -> None:
        """Leave the sampling under way, at its next token; nothing happens when none is."""
        self.outbox.given_up = True

    def news(self) -> tuple[News, tuple[NDArray[Any], ...]]:
        """Return the events since the previous query, and the arrays beside their groups."""
        lines, self._read = read_log(self._log, self._read)
        tokens, packed, notices, sequences = self.outbox.take()
        groups, beside = packed.parted()
        return News(lines=lines, tokens=tokens, sequences=sequences, groups=groups, notices=notices), beside

    def _guarded(self, thread: ThreadPoolExecutor, work: Callable[[], Any]) -> Any:
        if thread is self._thread:
            self.outbox.given_up = False
        try:
            return thread.submit(work).result()
        except GivenUp:
            return None
        except Exception as error:  # noqa: BLE001  # the boundary between two processes: it is reported, not swallowed
            if self._hosted is not None:
                self._hosted.failed()
            return failure_of(error)


def failure_of(error: Exception) -> Failure:
    """Convert an error to plain values."""
    if isinstance(error, RequestError):
        return Failure(kind=type(error).__name__, text="", problems=tuple(error.problems))
    if isinstance(error, RunStopped):
        return Failure(kind="RunStopped", text=str(error))
    return Failure(kind="", text="".join(traceback.format_exception(error)))
