"""What the model writes becomes an action; patterns, templates and words are checked."""

from __future__ import annotations

from typing import Any

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


def a_lake(**wording: Any) -> Any:
    from posttrain.envs.frozen_lake import frozen_lake

    return frozen_lake(EnvSpec(name="frozen_lake"), size=2, slippery=False, ice_share=1.0, instruction="Go.", **wording)


def test_templates_of_2025_have_the_state_and_the_reward_before_it() -> None:
    game = a_lake(
        template="Turn {turn_idx}: {state} {actions_left} left, as {format_template}.",
        reward_template="Reward {reward}. ",
        answer_format="<answer>X</answer>",
        first_turn=0,
        max_turns=3,
    )
    [first] = game.reset(0).messages
    lake = game._seen
    assert first["content"] == f"Go.\nTurn 0: {lake} 3 left, as <answer>X</answer>."
    step = game.step("nonsense")
    assert step.conversation is None
    assert step.messages[0]["content"] == f"Reward 0.0. Turn 1: {lake} 2 left, as <answer>X</answer>."


def test_turns_apart_read_the_last_turns_in_their_own_prompt() -> None:
    game = a_lake(
        template="{env_instruction} {step_count} done, {history_length} here: [{history}] now {current_step}: "
        "{current_observation}",
        system="Play.",
        turns_apart=True,
        history_turns=1,
        max_turns=4,
    )
    start = game.reset(0)
    lake = game._seen
    assert start.messages == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": f"Go. 0 done, 0 here: [] now 1: {lake}"},
    ]
    game.step("nonsense")
    step = game.step("I say <answer>Fly</answer>")
    invalid = "I say <answer>Fly</answer>(IMPORTANT TIPS: this action is not valid, your new response *must* strictly"
    system, user = step.conversation
    assert system == {"role": "system", "content": "Play."}
    assert user["content"].startswith(f"Go. 2 done, 1 here: [(step: 2, state: {lake}, action: {invalid}")
    assert user["content"].endswith(f", reward: 0)] now 3: {lake}")
    game.step("<answer>Up</answer>")
    assert game.step("<answer>Up</answer>").conversation is None  # the last turn: nothing is read after it


@pytest.mark.parametrize(("name", "text"), [("template", "{stat}"), ("reward_template", "{rewrd}")])
def test_a_template_with_an_unknown_field_is_refused_at_once(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be filled") as raised:
        a_lake(**{name: text})
    assert raised.value.problems[0].field == name
