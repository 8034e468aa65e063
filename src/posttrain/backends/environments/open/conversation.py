"""A conversation of a program outside the run, and its description for the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.backends.environments.open.places import Group, Place
from posttrain.config.environment import OPEN
from posttrain.envs.agent.turns import AskedTurns
from posttrain.interfaces.env import EnvStart
from posttrain.records.trajectories import Trajectory

PAST = {"ended": "ended", "failed": "failed", "dropped": "been dropped"}  # states, after "has"


@dataclass(slots=True, eq=False)
class OpenConversation:
    """A conversation of a program outside, which is an episode of the run."""

    name: str
    group: Group
    place: Place
    turns: AskedTurns
    last_used: float
    # open, scoring (its environment scores it), ended, failed or dropped; the last two with the reason.
    state: str = "open"
    why: str = ""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    # Sampled turns that are not answered yet.
    responses: dict[str, Trajectory] = field(default_factory=dict)
    named: bool = False  # by its caller
    by_call: bool = False  # begun by POST /conversations
    task: EnvStart | None = None  # that its environment sets

    @property
    def has_scorer(self) -> bool:
        """True where an environment of the run gives the reward."""
        return self.place.spec.name != OPEN


def described(talk: OpenConversation) -> dict[str, Any]:
    """Return the description of a conversation for its caller."""
    messages = talk.task.messages if talk.task else ()
    tools = list(talk.task.tools) if talk.task else []
    row = {name: value for name, value in talk.place.spec.row.items() if name != "ground_truth"}
    return {
        "conversation": talk.name,
        "sample": talk.place.episode,
        "group": talk.group.name,
        "state": talk.state,
        **({"why": talk.why} if talk.why else {}),
        "turns": talk.turns.turns,
        "reward": talk.reward,
        "messages": list(messages or talk.place.spec.messages),
        **({"tools": tools} if tools else {}),
        "row": row,
        "seed": talk.place.seed,
    }
