"""What the model writes becomes an action; patterns, templates and words are checked."""

from __future__ import annotations

import pytest

from posttrain.envs.text_game import Played, TextGame
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

SPEC = EnvSpec(name="walk")


class Walk:
    """Go right three times."""

    instruction = "Go."
    actions = ("Left", "Right")

    def begin(self, seed: int) -> str:
        self.place = 0
        return self.state()

    def act(self, action: str | None) -> Played:
        self.place += {"Left": -1, "Right": 1, None: 0}[action]
        done = self.place == 3
        return Played(seen=self.state(), reward=float(done), done=done, success=done, effective=action is not None)

    def state(self) -> str:
        return f"at {self.place}"


def test_a_won_game() -> None:
    game = TextGame(SPEC, Walk(), system="Play.", template="{turn_idx}: {observation} ({actions_left} left)")
    start = game.reset(1)
    assert list(start.messages) == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Go.\n1: at 0 (10 left)"},
    ]
    assert start.state_key == "at 0"
    first = game.step("I think <answer> RIGHT </answer><|im_end|>")
    assert (first.reward, first.done, first.state_key) == (0.0, False, "at 1")
    assert first.messages[0]["content"] == "2: at 1 (9 left)"
    game.step("<answer>right</answer> or <answer>left</answer>")  # the first counts
    last = game.step("<answer><|im_start|>right</answer>")
    assert (last.reward, last.done, last.stop) == (1.0, True, "solved")
    assert game.close() == {
        "success": 1.0,
        "num_actions": 3.0,
        "action_is_valid": 1.0,
        "action_is_effective": 1.0,
        "format_penalty": 0.0,
    }


def test_an_answer_without_an_action_costs_its_penalty_and_a_turn() -> None:
    game = TextGame(SPEC, Walk(), max_turns=4, format_penalty=-0.25)
    game.reset(1)
    rewards = [game.step(reply).reward for reply in ("right", "<answer>up</answer>", "<answer>right</answer>")]
    assert rewards == [-0.25, -0.25, 0.0]
    end = game.step("")
    assert (end.reward, end.done, end.stop) == (-0.25, True, "max_turns")
    metrics = game.close()
    assert (metrics["success"], metrics["action_is_valid"]) == (0.0, 0.25)
    assert metrics["format_penalty"] == -0.1875  # 3 turns of 4, -0.25 each


def test_the_runs_limit_of_turns_holds_too() -> None:
    game = TextGame(EnvSpec(name="walk", max_turns=1), Walk(), max_turns=4)
    game.reset(1)
    assert game.step("<answer>right</answer>").stop == "max_turns"


def test_a_thought_and_an_action() -> None:
    pattern = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
    game = TextGame(SPEC, Walk(), action_pattern=pattern, action_words={"Right": "east"})
    game.reset(1)
    assert game.step("<think>west?\nno</think>\n<answer>East</answer>").state_key == "at 1"
    assert game.step("<answer>east</answer>").state_key == "at 1"  # no thought
    assert game.step("<think></think><answer>right</answer>").state_key == "at 1"  # the word for it is east
    assert game.step("<think></think><answer>left</answer>").state_key == "at 0"


@pytest.mark.parametrize(
    ("wording", "message"),
    [
        ({"action_pattern": "("}, r"the action pattern '\(' is no regular expression"),
        ({"action_pattern": "a"}, "has 0 groups; use one group around the action"),
        ({"action_pattern": "(a)(b)(c)"}, "has 3 groups"),
        (
            {"template": "{observaton}"},
            "the template of a turn cannot be filled: 'observaton'; use the fields observation",
        ),
        ({"template": "{"}, "cannot be filled"),
        ({"template": "{0}"}, "cannot be filled"),
        ({"action_words": {"Rihgt": "east"}}, "action_words has a word for 'Rihgt', which is no action .*mean Right"),
    ],
)
def test_wording_that_cannot_be_used(wording: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextGame(SPEC, Walk(), **wording)  # type: ignore[arg-type]
