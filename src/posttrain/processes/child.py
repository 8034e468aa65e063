"""One child process that keeps state and answers calls in their order: the user's own objects, away from the trainer's.

    trainer  ──frames──▶  child      python -m posttrain.processes.child
    Child                 main

The child builds its handler once, by the factory that the first frame names, and calls it with the value of each further frame.
Unlike the workers of ``pool.py`` it is neither forked nor replaced: when it dies, or does not answer in time, so does its state.
It ends with its parent, and everything that it started ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from typing import IO, Any

from posttrain.errors import ConfigError, PosttrainError, Problem, RequestError
from posttrain.processes import descendants, frames, proc, start, wire
from posttrain.processes.environment import Kind, variables_for
from posttrain.processes.worker import load
from posttrain.user_files import own_line

PATIENCE_S = 2.0  # for a child whose input has ended
MOST_ANSWER_BYTES = 1 << 30
_LAST_WORDS = 1000  # characters


class ChildFailed(PosttrainError):
    """A call raised in the child, or the child ended or was late; the message says which, with the user's own file and line."""


class Child:
    """A child process with a handler made by ``factory``, "package.module:function", of ``setup``.

    Args: ``load_s`` and ``call_s`` limit the building of the handler and one call; ``variables`` names further environment
        variables that the child may see.
    Raises: ConfigError with the problems of building the handler.
    """

    def __init__(
        self, factory: str, setup: Any, *, load_s: float, call_s: float, variables: Collection[str] = ()
    ) -> None:
        self._call_s = call_s
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child lives
        self._process = start.start(
            start.module_command("posttrain.processes.child"),
            environment={
                **variables_for(Kind.USER_CODE, named=variables), **start.ONE_THREAD, **start.module_path(),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )  # fmt: skip
        try:
            problems = self._exchange({"factory": factory, "setup": setup, "sys_path": sys.path}, load_s)
        except ChildFailed as error:
            self.close()
            raise ConfigError(Problem(str(error))) from error
        if problems:
            self.close()
            raise ConfigError(
                [Problem(what, fix=fix, where=where, field=field) for what, fix, where, field in problems]
            )

    def call(self, value: Any, *, timeout_s: float | None = None) -> Any:
        """Call the handler. Raises: ChildFailed."""
        said = self._exchange(value, timeout_s or self._call_s)
        if "error" in said:
            raise ChildFailed(said["error"])
        return said["answer"]

    def close(self) -> None:
        """End the child and everything that it has started."""
        if self._process.poll() is None:
            below = [*proc.descendants(self._process.pid), *proc.of_session(self._process.pid)]
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            start.end(self._process, PATIENCE_S)
            descendants.kill(below)
        self._said.close()

    def _exchange(self, value: Any, timeout_s: float) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            frames.write_frame(self._process.stdin.fileno(), wire.to_bytes(value))
            return wire.from_bytes(frames.read_frame(self._process.stdout.fileno(), MOST_ANSWER_BYTES, timeout_s))
        except TimeoutError as error:
            start.end_tree(self._process)
            raise ChildFailed(f"it did not answer within {timeout_s:g} s{self._last_words()}") from error
        except (frames.PipeClosed, frames.FrameTooLong, OSError, ValueError) as error:
            start.end(self._process, PATIENCE_S)
            code = self._process.returncode
            raise ChildFailed(f"its process ended: {start.ended_in_words(code)}{self._last_words()}") from error

    def _last_words(self) -> str:
        end = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(end - _LAST_WORDS, 0))
        text = self._said.read().decode(errors="replace").strip()
        return f"; it printed: {text}" if text else ""


def main() -> None:
    """Serve calls from stdin on stdout until stdin ends. What the handler prints goes to stderr."""
    descendants.die_with_parent(os.getppid())
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with suppress(frames.PipeClosed):
        first = wire.from_bytes(frames.read_frame(calls, MOST_ANSWER_BYTES))
        sys.path[:] = first["sys_path"]
        try:
            handler = load(first["factory"], first["setup"])
        except RequestError as error:
            found = [[each.what, each.fix, each.where, each.field] for each in error.problems]
            frames.write_frame(answers, wire.to_bytes(found))
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may fail in any way
            frames.write_frame(answers, wire.to_bytes([[described(error), "", "", ""]]))
            return
        frames.write_frame(answers, wire.to_bytes([]))
        while True:
            call = wire.from_bytes(frames.read_frame(calls, MOST_ANSWER_BYTES))
            frames.write_frame(answers, _answer(handler, call))


def described(error: BaseException) -> str:
    """Describe an error with the user's own file and line, in at most 500 characters."""
    place = own_line(error)
    text = f"{type(error).__name__}: {error}"
    return f"{text[:500]}{f' ({place})' if place else ''}"


def _answer(handler: Any, call: Any) -> bytes:
    try:
        return wire.to_bytes({"answer": handler(call)})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may fail in any way
        return wire.to_bytes({"error": described(error)})


if __name__ == "__main__":
    main()
