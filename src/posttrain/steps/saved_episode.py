"""An episode in the middle, as plain values for checkpoints: its tokens, its turn in progress, and its environment's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from pydantic import TypeAdapter

from posttrain.interfaces.env import TurnOptions
from posttrain.interfaces.rollout_engine import Request
from posttrain.records.saved_groups import (
    trajectory_from_plain,
    trajectory_to_plain,
    unfinished_from_plain,
    unfinished_to_plain,
)
from posttrain.records.trajectories import OwnDraws, StopReason, Turn
from posttrain.steps.conversations import Conversations, RequestedTurn
from posttrain.steps.episode import Episode

_TURNS: Final = TypeAdapter(list[Turn])
_AS_THEY_ARE = ("state_key", "sealed", "used", "used_elsewhere", "count", "env_stop")
_DRAWS: Final = TypeAdapter(list[OwnDraws])
_LISTS = ("messages", "tools", "ids", "logprobs", "mask", "prompt_ids")


def can_be_saved(episode: Episode | Conversations) -> bool:
    """Return False for episodes that show images, which begin again."""
    if isinstance(episode, Conversations):
        return all(can_be_saved(line) for line in episode.lines.values())
    return episode.shown is None and episode.read is None and all(each.images is None for each in episode.earlier)


def episode_to_plain(episode: Episode) -> dict[str, Any]:
    return {
        **{name: getattr(episode, name) for name in _AS_THEY_ARE},
        **{name: list(getattr(episode, name)) for name in _LISTS},
        "metrics": dict(episode.metrics),
        "stop_reason": str(episode.stop_reason),
        "turns": _TURNS.dump_python(episode.turns, mode="json"),
        "own_draws": _DRAWS.dump_python(episode.own_draws, mode="json"),
        "earlier": [trajectory_to_plain(each) for each in episode.earlier],
        "last": None if episode.last is None else trajectory_to_plain(episode.last),
    }


def episode_from_plain(new: Episode, plain: Mapping[str, Any]) -> Episode:
    """Return a new episode as it was when it was saved."""
    unchanged: dict[str, Any] = {name: plain[name] for name in _AS_THEY_ARE}
    lists: dict[str, Any] = {name: list(plain[name]) for name in _LISTS if name != "prompt_ids"}
    return replace(
        new,
        **unchanged,
        **lists,
        prompt_ids=tuple(plain["prompt_ids"]),
        metrics=dict(plain["metrics"]),
        stop_reason=StopReason(plain["stop_reason"]),
        turns=_TURNS.validate_python(plain["turns"]),
        own_draws=_DRAWS.validate_python(plain.get("own_draws", [])),
        earlier=[trajectory_from_plain(each) for each in plain["earlier"]],
        last=None if plain["last"] is None else trajectory_from_plain(plain["last"]),
    )


def conversations_to_plain(talk: Conversations) -> dict[str, Any]:
    """Return the conversations of an environment that asks for turns by itself; those with the newest turns stay last."""
    asked = [
        {
            "turn": turn,
            "line": each.line,
            "request": request_to_plain(each.request),
            "before": None if each.before is None else episode_to_plain(each.before),
            "options": asdict(each.options),
        }
        for turn, each in talk.asked.items()
    ]
    return {
        "lines": [[number, episode_to_plain(line)] for number, line in talk.lines.items()],
        "untrained": sorted(talk.untrained),
        "asked": asked,
        "pending": sorted(talk.pending),
        "names": sorted(talk.names),
        "stop_reason": str(talk.stop_reason),
        "env_stop": talk.env_stop,
        "metrics": dict(talk.metrics),
    }


def conversations_from_plain(new: Episode, plain: Mapping[str, Any]) -> Conversations:
    """Return the conversations of an episode as they were saved. ``new``: an episode of the same prompt."""
    rules = replace(new.rules, max_turns=None)

    def line_of(saved: Mapping[str, Any]) -> Episode:
        return episode_from_plain(Episode(new.prompt, new.sample_id, new.writer, rules), saved)

    asked = {
        each["turn"]: RequestedTurn(
            each["line"],
            request_from_plain(each["request"]),
            None if each["before"] is None else line_of(each["before"]),
            TurnOptions(**{**each["options"], "stop": tuple(each["options"]["stop"])}),
        )
        for each in plain["asked"]
    }
    return Conversations(
        new.prompt,
        new.sample_id,
        new.writer,
        new.rules,
        lines={number: line_of(line) for number, line in plain["lines"]},
        untrained=set(plain["untrained"]),
        asked=asked,
        pending=set(plain["pending"]),
        names=set(plain["names"]),
        stop_reason=StopReason(plain["stop_reason"]),
        env_stop=plain["env_stop"],
        metrics=dict(plain["metrics"]),
    )


def request_to_plain(request: Request) -> dict[str, Any]:
    """Return a turn that the policy takes, with the tokens that it has."""
    return {
        "sample_id": request.sample_id,
        "token_ids": list(request.token_ids),
        "max_response_tokens": request.max_response_tokens,
        "conversation": request.conversation,
        "seed": request.seed,
        "draws_as": request.draws_as,
        "begun": None if request.begun is None else unfinished_to_plain(request.begun),
    }


def request_from_plain(plain: Mapping[str, Any]) -> Request:
    begun = None if plain["begun"] is None else unfinished_from_plain(plain["begun"])
    return Request(**{**plain, "token_ids": tuple(plain["token_ids"]), "begun": begun})
