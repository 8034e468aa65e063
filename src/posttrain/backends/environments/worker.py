"""A process that holds one environment at a time and answers commands over a socket. Forked by ``processes.fork_server``."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.backends.environments.make import (
    HostedEpisode,
    builder_of,
    failure_of,
    finished_of,
    loading_failures,
    spec_of,
)
from posttrain.libraries.own_code import load
from posttrain.processes import wire
from posttrain.processes.frames import PipeClosed, read_frame, write_frame
from posttrain.registry import TOOLS, plug_in

MOST_BYTES = 1 << 28  # of one command; the host limits answers


def preload(
    names: Sequence[str], own: Sequence[str], modules: Sequence[str], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Import once, before the first fork, the libraries of registered environments and tools, and the user's own files: each
    worker holds alone what is imported later.

    Args: modules, plug-ins whose environments become known; tools, built-in ones with their options.
    """
    plug_in(modules)
    for name in names:
        with contextlib.suppress(Exception):  # an episode that needs it says why it cannot be loaded
            builder_of(name)
    for tool in tools:
        options = {name: value for name, value in tool.items() if name not in ("name", "schema")}
        with contextlib.suppress(Exception):
            build = TOOLS.get(tool["name"])
            if TOOLS.facts(tool["name"]).built_once:
                build(**options)
    for name in own:
        with contextlib.suppress(BaseException):  # such a file may also call sys.exit
            load(name)


def serve(fd: int) -> None:
    """Answer commands until the socket ends.

    Commands: {"do": "load", "names": …}, {"do": "start", "spec": …, "seed": …, "saved": …}, {"do": "close"},
    {"do": "task", "spec": …, "seed": …}, {"do": "score", "conversation": …} with spec and seed where no task came before,
    {"do": "step", "action": …, "cut": …}, {"do": "answer", "turn": …, …}. Answers: {"ok": what the environment returned},
    or {"failed": [reason, detail]}. The start of an environment that asks for turns by itself is answered by
    {"ok": "asks"}; its events come as
    {"event": …}, and an answered turn has no answer, unless it fails. A command's "number" comes back with its answer.
    """
    with contextlib.suppress(PipeClosed, ValueError):  # the trainer has gone
        _Hosting(fd).serve()


class _Hosting:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._episode: HostedEpisode | None = None
        self._writing = threading.Lock()
        self._number = 0  # of the episode: events of one that is over are dropped

    def serve(self) -> None:
        while True:
            command = wire.from_bytes(read_frame(self._fd, MOST_BYTES))
            number = {"number": command.pop("number")} if "number" in command else {}
            data: bytes | None
            try:
                found = self._done(command)
                data = None if command["do"] == "answer" else wire.to_bytes({"ok": found, **number})
            except BaseException as error:  # noqa: BLE001 - someone's code, which may also call sys.exit; it is reported
                data = wire.to_bytes({"failed": list(failure_of(error)), **number})
                self._number += 1
                if self._episode is not None:
                    with contextlib.suppress(BaseException):
                        self._episode.close()
                    self._episode = None
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if data is not None:
                self._write(data)
            begins = command["do"] == "start" and command.get("saved") is None
            if begins and self._episode is not None and self._episode.asks:
                self._begin(self._episode)

    def _done(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "load":
                return loading_failures(command["names"])
            case "start":
                self._episode = None
                self._episode = HostedEpisode(spec_of(command["spec"]), command["seed"])
                if (saved := command.get("saved")) is not None:
                    return self._episode.restore(saved, self._emitter())
                return "asks" if self._episode.asks else self._episode.reset()
            case "task":
                self._episode = None
                self._episode = HostedEpisode(spec_of(command["spec"]), command["seed"])
                return self._episode.task()
            case "score":
                if "spec" in command:
                    self._episode = None
                    self._episode = HostedEpisode(spec_of(command["spec"]), command["seed"])
                assert self._episode is not None
                return self._episode.score(finished_of(command["conversation"]))
        assert self._episode is not None
        match command["do"]:
            case "step":
                return self._episode.step(command["action"], command["cut"])
            case "answer":
                return self._episode.answer(
                    **{name: value for name, value in command.items() if name not in ("do", "number")}
                )
        self._number += 1
        ending, self._episode = self._episode, None
        return ending.close()

    def _begin(self, episode: HostedEpisode) -> None:
        """Begin the episode of an environment that asks for turns by itself."""
        emit = self._emitter()
        try:
            episode.begin(emit)
        except Exception as error:  # noqa: BLE001 - someone's code
            emit({"failed": list(failure_of(error))})

    def _emitter(self) -> Callable[[dict[str, Any]], None]:
        """Return a function that sends the events of the present episode, as long as it is that."""
        number = self._number

        def emit(event: dict[str, Any]) -> None:
            if number == self._number:
                with contextlib.suppress(PipeClosed, OSError):  # the trainer has gone
                    self._write(wire.to_bytes({"event": event}))

        return emit

    def _write(self, data: bytes) -> None:
        with self._writing:
            write_frame(self._fd, data)
