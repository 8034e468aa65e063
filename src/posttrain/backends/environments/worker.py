"""A process that holds one environment at a time and answers commands over a socket. Forked by ``processes.fork_server``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from posttrain.backends.environments.make import HostedEpisode, builder_of, failure_of, loading_failures, spec_of
from posttrain.libraries.own_code import load
from posttrain.processes import wire
from posttrain.processes.frames import PipeClosed, read_frame, write_frame
from posttrain.registry import plug_in

MOST_BYTES = 1 << 28  # of one command; the host limits answers


def preload(names: Sequence[str], own: Sequence[str], modules: Sequence[str]) -> None:
    """Import once, before the first fork, the libraries of registered environments and the user's own files.

    Args: modules, plug-ins whose environments become known.
    """
    plug_in(modules)
    for name in names:
        with contextlib.suppress(Exception):  # an episode that needs it says why it cannot be loaded
            builder_of(name)
    for name in own:
        with contextlib.suppress(BaseException):  # such a file may also call sys.exit
            load(name)


def serve(fd: int) -> None:
    """Answer commands until the socket ends.

    Commands: {"do": "load", "names": …}, {"do": "start", "spec": …, "seed": …}, {"do": "step", "action": …, "cut": …},
    {"do": "close"}. Answers: {"ok": what the environment returned}, or {"failed": [reason, detail]}.
    """
    episode: HostedEpisode | None = None
    with contextlib.suppress(PipeClosed, ValueError):  # the trainer has gone
        while True:
            command = wire.from_bytes(read_frame(fd, MOST_BYTES))
            answer: dict[str, Any]
            try:
                if command["do"] == "load":
                    answer = {"ok": loading_failures(command["names"])}
                elif command["do"] == "start":
                    episode = None
                    episode = HostedEpisode(spec_of(command["spec"]), command["seed"])
                    answer = {"ok": episode.reset()}
                elif command["do"] == "step":
                    assert episode is not None
                    answer = {"ok": episode.step(command["action"], command["cut"])}
                else:
                    assert episode is not None
                    ending, episode = episode, None
                    answer = {"ok": ending.close()}
                data = wire.to_bytes(answer)
            except BaseException as error:  # noqa: BLE001 - someone's code, which may also call sys.exit; it is reported
                data = wire.to_bytes({"failed": list(failure_of(error))})
                if episode is not None:
                    with contextlib.suppress(BaseException):
                        episode.close()
                    episode = None
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            write_frame(fd, data)
