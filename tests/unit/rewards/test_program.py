"""The reward object of a fork's main program, and its functions by data source, called as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from posttrain.config.reward import RewardConfig, RewardTerm
from posttrain.errors import ConfigError
from posttrain.interfaces.reward import BatchedRewardFn
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.load import check_rewards, load_rewards
from posttrain.rewards.score import response_texts
from verl_scores_fork import KNIGHTS, MAIN, NAIVE, PLACES, SCORES, write


@pytest.fixture(autouse=True)
def _modules_are_put_back() -> Iterator[None]:
    def of_verl() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "verl"}

    before, path, finders = of_verl(), list(sys.path), list(sys.meta_path)
    for name in before:
        del sys.modules[name]
    yield
    for name in of_verl():
        del sys.modules[name]
    sys.modules.update(before)
    sys.path[:], sys.meta_path[:] = path, finders


def scored(term: RewardTerm, *responses: tuple[int, ...]) -> list[float | str]:
    prompt = Prompt(prompt_id="a:0", token_ids=(1, 2), text="?", data_source="knights", ground_truth="7 8")
    made = tuple(
        Trajectory(
            sample_id=f"a:0/{number}",
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            text="unread",
            stop_reason=StopReason.EOS,
            policy_version=0,
        )
        for number, ids in enumerate(responses)
    )
    config = RewardConfig(terms=[term])
    assert check_rewards(config) == []
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(str(int(one)) for one in ids))
    found = load_rewards(config, tokenizer=lambda: tokenizer).score(TrajectoryGroup(prompt=prompt, trajectories=made))
    return [each.value for each in found]


def program(folder: Path, **options: object) -> RewardTerm:
    return RewardTerm(name="RewardManager", path=str(folder / PLACES["main"]), kind="program", options=options)


def test_the_object_is_made_by_the_programs_statements(tmp_path: Path) -> None:
    write(tmp_path, main=MAIN, scores="", knights=KNIGHTS)
    term = program(tmp_path, algorithm={"shaping": {"bonus": 0.25}})
    # Its text is the prompt 1 2 and the response: 1 for its beginning, 1 for a right end; halved, and 0.25 added
    assert scored(term, (7, 8), (7, 9)) == [1.25, 0.75]


def test_a_key_that_is_not_there_takes_the_programs_default(tmp_path: Path) -> None:
    write(tmp_path, main=MAIN, scores="", knights=KNIGHTS)
    assert scored(program(tmp_path, algorithm={}), (7, 8), (7, 9)) == [1.0, 0.5]


def test_rewards_beside_further_values_for_the_forks_loop_are_taken(tmp_path: Path) -> None:
    write(tmp_path, main=MAIN.replace("return rewards\n", "return rewards, 3\n"), scores="", knights=KNIGHTS)
    assert scored(program(tmp_path, algorithm={}), (7, 8)) == [1.0]


@pytest.mark.parametrize("parameter", ["step", "global_steps=9"])
def test_an_object_that_takes_the_step_gets_its_number(tmp_path: Path, parameter: str) -> None:
    """As ``self.reward_fn(batch, self.global_steps)`` hands it over; a default does not stand for it."""
    name = parameter.partition("=")[0]
    main = MAIN.replace("data: DataProto)", f"data: DataProto, {parameter})").replace(
        "return rewards\n", f"return rewards * {name}\n"
    )
    write(tmp_path, main=main, scores="", knights=KNIGHTS)
    config = RewardConfig(terms=[program(tmp_path, algorithm={})])
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(str(int(one)) for one in ids))
    terms = load_rewards(config, tokenizer=lambda: tokenizer).terms
    prompt = Prompt(prompt_id="a:0", token_ids=(1, 2), text="?", data_source="knights", ground_truth="7 8")
    sampled = Trajectory(sample_id="a:0/0", token_ids=(7, 8), logprobs=(0.0, 0.0), text="", stop_reason=StopReason.EOS,
                         policy_version=0)  # fmt: skip
    group = TrajectoryGroup(prompt=prompt, trajectories=(sampled,))
    (text,) = response_texts(group, terms, None, step=4)
    reward = cast(BatchedRewardFn, terms[0].reward)
    (found,) = reward([prompt], [text.read_by(terms[0])])
    assert isinstance(found, Mapping) and found["score"] == 4.0


def test_scorers_by_data_source_are_the_forks(tmp_path: Path) -> None:
    write(tmp_path, naive=NAIVE.format(arguments=""), scores=SCORES, knights=KNIGHTS)
    term = RewardTerm(name="NaiveRewardManager", path=str(tmp_path / PLACES["naive"]), kind="manager")
    assert scored(term, (7, 8), (7, 9)) == [2.0, 1.0]


def test_a_manager_of_verl_0_7_asks_its_base_for_scores_of_a_model(tmp_path: Path) -> None:
    later = NAIVE.format(arguments="").replace(
        "class NaiveRewardManager:", "class NaiveRewardManager(AbstractRewardManager):"
    )
    later = later.replace(
        "import register", "import register\nfrom verl.workers.reward_manager.abstract import AbstractRewardManager"
    )
    later = later.replace(
        "        rewards = ",
        "        if (found := self._extract_reward_from_rm_scores(data, return_dict)) is not None:\n"
        "            return found\n        rewards = ",
    )
    write(tmp_path, naive=later, scores=SCORES, knights=KNIGHTS)
    term = RewardTerm(name="NaiveRewardManager", path=str(tmp_path / PLACES["naive"]), kind="manager")
    assert scored(term, (7, 8), (7, 9)) == [2.0, 1.0]


def test_sections_among_the_options_have_attributes(tmp_path: Path) -> None:
    naive = NAIVE.format(arguments=", weights=None").replace(
        "self.tokenizer, self.compute_score = tokenizer, compute_score or default_compute_score",
        "self.tokenizer, self.compute_score = tokenizer, lambda *_: weights.right",
    )
    write(tmp_path, naive=naive, scores=SCORES, knights=KNIGHTS)
    term = RewardTerm(
        name="NaiveRewardManager",
        path=str(tmp_path / PLACES["naive"]),
        kind="manager",
        options={"weights": {"right": 0.5}},
    )
    assert scored(term, (7, 8)) == [0.5]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (MAIN.replace("import knights", "import knights, absent_one"), "absent_one"),
        (MAIN.replace("shaping or {}", "shaping.bonus"), "main_ppo.py:21: .*shaping|main_ppo.py:.*NoneType"),
    ],
)
def test_what_cannot_be_made_is_named_with_the_forks_line(tmp_path: Path, changed: str, said: str) -> None:
    write(tmp_path, main=changed, scores="", knights=KNIGHTS)
    config = RewardConfig(terms=[program(tmp_path, algorithm={})])
    with pytest.raises(ConfigError, match=said):
        load_rewards(config, tokenizer=lambda: SimpleNamespace())


def test_a_class_that_the_program_does_not_pass_on_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, main=MAIN, scores="", knights=KNIGHTS)
    term = program(tmp_path).model_copy(update={"name": "RewardManger"})
    (problem,) = check_rewards(RewardConfig(terms=[term]))
    assert "passes no object of a class RewardManger" in problem.what and problem.fix == "name RewardManager"
