"""gymnasium's environments in text."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec
from posttrain.registry import ENVS

pytest.importorskip("gymnasium")
SPEC = EnvSpec(name="gymnasium")
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "actions": ["Left", "Down", "Right", "Up"]}


def test_its_lake_is_walked() -> None:
    env = ENVS.get("gymnasium")(SPEC, **LAKE, options={"is_slippery": False}, format_penalty=-0.5)
    start = env.reset(3)
    assert start.messages[0]["content"].endswith("\n[S]FFF\nFHFH\nFFFH\nHFFG\n")
    first = env.step("<answer>down</answer>")
    assert first.messages[0]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n"
    assert first.state_key != start.state_key
    wrong = env.step("down")
    assert (wrong.reward, wrong.state_key) == (-0.5, first.state_key)
    last = [env.step(f"<answer>{move}</answer>") for move in ("down", "right", "down", "right", "right")][-1]
    assert (last.reward, last.done, last.stop) == (1.0, True, "solved")
    assert env.close()["success"] == 1.0


def test_a_hole_is_no_success() -> None:
    env = ENVS.get("gymnasium")(SPEC, **LAKE, options={"is_slippery": False})
    env.reset(3)
    fallen = [env.step(f"<answer>{move}</answer>") for move in ("down", "right")][-1]
    assert (fallen.reward, fallen.stop) == (0.0, "lost")


def test_numbers_are_seen_as_text_and_seeds_repeat() -> None:
    build = ENVS.get("gymnasium")
    starts = [build(SPEC, id="CartPole-v1", actions=["left", "right"]).reset(seed) for seed in (1, 1, 2)]
    texts = [start.messages[0]["content"] for start in starts]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LAKE | {"id": "FrozenLke-v1"}, "Did you mean: `FrozenLake`"),
        (LAKE | {"options": {"slip": 1}}, "unexpected keyword argument 'slip'"),
        (LAKE | {"actions": ["Left"]}, r"has the actions Discrete\(4\), but 1 names are given"),
        ({"id": "Pendulum-v1", "actions": ["Left"]}, "give a name for each action of a discrete space"),
    ],
)
def test_what_cannot_be_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ENVS.get("gymnasium")(SPEC, **settings)
