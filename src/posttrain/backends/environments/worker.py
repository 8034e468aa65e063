"""A process that holds one environment at a time and does what it is told over a socket. Forked by the server."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Never

from posttrain.backends.environments.make import Episode, failure_of, spec_of
from posttrain.processes import descendants, wire

MOST_BYTES = 1 << 28  # of one command; of an answer the host's limit holds


def serve(fd: int, server: int) -> Never:
    """Answer commands until the socket ends. Commands: {"do": "start", "spec": …, "seed": …}, {"do": "step", "action": …,
    "cut": …}, {"do": "close"}. Answers: {"ok": what the environment returned}, or {"failed": [reason, detail]}."""
    os.setsid()  # a group of its own, to be killed at once
    descendants.die_with_parent(server)
    descendants.be_killed_first()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    episode: Episode | None = None
    try:
        while True:
            command = wire.from_bytes(wire.read_frame(fd, MOST_BYTES))
            answer: dict[str, Any]
            try:
                if command["do"] == "start":
                    episode = None
                    episode = Episode(spec_of(command["spec"]), command["seed"])
                    answer = {"ok": episode.reset()}
                elif command["do"] == "step":
                    assert episode is not None
                    answer = {"ok": episode.step(command["action"], command["cut"])}
                else:
                    assert episode is not None
                    ending, episode = episode, None
                    answer = {"ok": ending.close()}
                data = wire.to_bytes(answer)
            except BaseException as error:  # noqa: BLE001 - someone's code, which may also call sys.exit; told to the host
                data = wire.to_bytes({"failed": list(failure_of(error))})
                if episode is not None:
                    with contextlib.suppress(BaseException):
                        episode.close()
                    episode = None
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            wire.write_frame(fd, data)
    except (wire.Ended, ValueError):  # the trainer has gone
        pass
    finally:
        os._exit(0)
