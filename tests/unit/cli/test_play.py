"""One episode played by hand, as its user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]

RUN = """
model: {{path: {model}}}
data: {{train_files: [rows.jsonl]}}
rollout: {{max_response_tokens: 200}}
environment: {{workers: 0}}
"""
WORLD = """
from posttrain.interfaces.env import EnvStart, EnvStep

class Echo:
    def __init__(self, spec):
        self.turns = 0
    def reset(self, seed):
        return EnvStart(messages=[{"role": "user", "content": f"seed {seed}"}])
    def step(self, action):
        self.turns += 1
        if action == "crash":
            raise KeyError("lost")
        return EnvStep(messages=[{"role": "user", "content": "?" + action}], reward=0.5, done=self.turns == 2, stop="enough")
    def close(self):
        return {"turns": self.turns}
"""

# As SkyRL's search environment: what stands behind the call is taken away
CUTTING = WORLD.replace("class Echo", "class Cutting").replace(
    "return EnvStep(", 'return EnvStep(action=action.partition("</search>")[0] + "</search>", '
)


@pytest.fixture
def posttrain(command: Run, tmp_path: Path, tiny_llama: Path) -> Run:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6*7?", "answer": "42"}\n')
    (tmp_path / "world.py").write_text(WORLD + CUTTING)
    (tmp_path / "run.yaml").write_text(RUN.format(model=tiny_llama))
    return partial(command, "play", "run.yaml")


GENERATED = ("data.train_files=[]", "environment.train_episodes=4")
ECHO = ("environment.name=world.py:Echo", *GENERATED)
GAME = ("environment.name=guess_number", "environment.max_turns=3", *GENERATED)


def test_a_person_takes_the_turns(posttrain: Run) -> None:
    code, out, _ = posttrain(*ECHO, "--row=2", "--tokens", typed="a\\nb\\\\n\nlast\n")
    assert code == 0
    assert "world.py:Echo, train:2" in out and "seed 1000002" in out
    assert "?a\nb\\n" in out  # \n is a line break, \\ a backslash
    assert "reward 0.5, the end: enough" in out and "reward 1 (environment 1)" in out and "turns 2" in out
    assert "=== training sample 1 of 1" in out and "place  mask" in out


def test_a_cut_response_begins_no_sample(posttrain: Run) -> None:
    _, out, _ = posttrain("environment.name=world.py:Cutting", *GENERATED, typed="<search>a</search>b c d\nlast\n")
    assert "; the environment has kept " in out and "a new training sample" not in out
    assert "=== training sample 1 of 1" in out


def test_another_action_than_the_sampled_one_begins_a_sample(posttrain: Run) -> None:
    _, out, _ = posttrain("environment.name=world.py:Cutting", *GENERATED, typed="<search>a\nlast\n")
    assert "a new training sample begins" in out and "=== training sample 2 of 2" in out


def test_a_script_and_what_is_trained(posttrain: Run, tmp_path: Path) -> None:
    (tmp_path / "turns.txt").write_text("one\ntwo\n")
    code, out, _ = posttrain(*ECHO, "--script=turns.txt", "--json")
    assert code == 0
    played = json.loads(out)
    assert (played["reward"], played["environment"]["stop"]) == (1.0, "enough")
    [sample] = played["samples"]
    trained = "".join(text for text, trained in zip(sample["tokens"], sample["mask"], strict=True) if trained)
    assert trained.replace("<|im_end|>", "|").replace("</s>", "|") == "one|two|"
    assert [turn["text"] for turn in sample["turns"]] == ["one", "two"]
    assert 0 in sample["mask"] and len(sample["mask"]) == len(sample["token_ids"])


def test_what_would_command_the_terminal_is_shown_as_signs(posttrain: Run, tmp_path: Path) -> None:
    (tmp_path / "turns.txt").write_text("\x1b[2Jone\ntwo\n")
    code, out, _ = posttrain(*ECHO, "--script=turns.txt")
    assert code == 0 and "\x1b" not in out and "?\u241b[2Jone" in out


def test_the_model_takes_the_turns(posttrain: Run) -> None:
    code, out, _ = posttrain(*GAME, "--model", "rollout.max_response_tokens=3")
    assert code == 0
    assert "--- turn 3: " in out and "ended by the environment: max_turns" in out


def test_a_run_without_an_environment_is_one_turn(posttrain: Run) -> None:
    code, out, _ = posttrain(typed="42\n")
    assert code == 0 and "single_turn, rows.jsonl:0" in out and "reward 1 (exact_match 1)" in out


def test_tools_answer_by_hand(posttrain: Run) -> None:
    call = json.dumps({"name": "calculator", "arguments": {"expression": "6*7"}})
    told = ("environment.name=tools", "+environment.settings.tools=[calculator]", "reward.terms=[{name: exact_match}]")
    code, out, _ = posttrain(*told, typed=f"<tool_call>{call}</tool_call>\n42\n")
    assert code == 0 and "the end: answered" in out and "reward 1" in out and "tool_calls 1" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((*ECHO, "--row=4"), 2, "there is no row 4: the training data have 4"),
        ((*ECHO, "--script=none.txt"), 2, "the script cannot be read"),
        ((*ECHO, "--script=-", "--model"), 2, "from a script or from the model"),
        ((*ECHO, "--environment=maze"), 2, "there is no environment 'maze' in environment.named"),
        ((*ECHO, "--validation"), 2, "there is no validation file to take a row from"),
        (("environment.name=wrld.py:Echo", *GENERATED), 2, "did you mean world.py?"),
        (ECHO, 3, "player_left: the player takes no more turns"),
    ],
)
def test_what_cannot_be_played(posttrain: Run, arguments: tuple[str, ...], code: int, said: str) -> None:
    found, _, err = posttrain(*arguments)
    assert found == code and said in " ".join(err.split())


def test_an_environment_that_fails_says_why(posttrain: Run) -> None:
    code, out, err = posttrain(*ECHO, typed="crash\n")
    assert code == 3 and "the environment has failed: env_crashed: KeyError: 'lost'" in out
    assert "the episode is not complete: env_crashed" in " ".join(err.split())
