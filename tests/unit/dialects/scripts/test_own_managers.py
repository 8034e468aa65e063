"""Launches of a fork whose trainer plays episodes with environment managers: found by structure, read with their own keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.managed_fork import LAUNCH, MAIN, managed_fork

from posttrain.cli.request import load_request
from posttrain.dialects.loaded import LoadedConfig
from posttrain.plan.checks.names import name_problems


def read(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str, **parts: str) -> LoadedConfig[Any]:
    managed_fork(folder, **parts)
    monkeypatch.chdir(folder)
    return load_request(["run.sh", *more], None, here=True, skip_files=True)


def test_the_plan_names_the_class_that_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = read(tmp_path, monkeypatch)
    said = " ".join(loaded.warnings)
    assert f"the episodes are played by LetterManager (line 34 of {tmp_path}/plays/worlds/managers.py)" in said
    assert f"what make_worlds (line 55 of {tmp_path}/plays/worlds/managers.py) makes to play_all (line 5)" in said
    assert not loaded.problems and not loaded.unsupported


def test_the_forks_keys_become_the_environment_and_the_estimator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read(tmp_path, monkeypatch).config
    world, found = config.environment, config.advantage
    assert (world.name, world.max_turns, world.sample_per_turn, world.turn_is_response) == (
        "env_manager",
        3,
        True,
        True,
    )
    assert (world.max_context_tokens, config.rollout.samples_per_prompt, config.reward.terms) == (200, 3, [])
    assert world.settings["invalid_action_penalty"] == 0.5
    assert world.settings["config"]["env"] == {
        "env_name": "Letters", "letters": "abcd", "seed": 7, "max_steps": 3, "rollout": {"n": 3},
    }  # fmt: skip
    assert world.settings["config"]["data"]["train_batch_size"] == 2
    assert (found.name, found.step_gamma, found.normalize_by_std, found.episodes_by_step) == ("gigpo", 0.5, True, True)
    # a mini-batch counts turns
    assert config.policy.sequences_per_mini_batch == 8


def test_states_that_are_alike_are_compared_where_the_fork_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("+algorithm.gigpo.enable_similarity=True", "+algorithm.gigpo.similarity_thresh=0.9")
    assert read(tmp_path, monkeypatch, *more).config.environment.similar_states == 0.9


def test_grpo_compares_turns_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(tmp_path, monkeypatch, estimator="grpo").config
    assert (config.advantage.name, config.environment.turn_is_response) == ("grpo", True)
    assert config.data.image_column is None  # of the rows, which say only that the managers show pictures


def test_a_start_has_one_episode_where_the_fork_makes_no_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = read(tmp_path, monkeypatch, "env.rollout.n=-1", estimator="reinforce_plus_plus")
    assert loaded.config.rollout.samples_per_prompt == 1 and not loaded.problems
    (problem,) = read(tmp_path, monkeypatch, "env.rollout.n=-1", estimator="rloo").problems
    assert (problem.field, problem.fix) == ("env.rollout.n", "use env.rollout.n=8, or algorithm.adv_estimator=gae")


def test_without_the_penalty_no_turn_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(tmp_path, monkeypatch, "+actor_rollout_ref.actor.use_invalid_action_penalty=False").config
    assert config.environment.settings["invalid_action_penalty"] == 0


@pytest.mark.parametrize(
    ("more", "key", "fix"),
    [
        ("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.n", "use actor_rollout_ref.rollout.n=1 with env.rollout.n"),
        ("env.rollout.n=some", "env.rollout.n", "use env.rollout.n=8"),
        ("algorithm.gigpo.mode=norm", "algorithm.gigpo.mode", "use algorithm.gigpo.mode=mean_std_norm"),
    ],
)  # fmt: skip
def test_a_value_that_such_a_fork_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, key: str, fix: str
) -> None:
    problem = read(tmp_path, monkeypatch, more).problems[0]
    assert (problem.field, problem.fix) == (key, fix)


def test_an_estimator_inside_the_trainer_gets_the_keys_that_its_loop_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = read(tmp_path, monkeypatch, "+algorithm.ranked.scale=3.0", estimator="ranked")
    assert not loaded.problems and not loaded.unsupported
    found = loaded.config.advantage
    assert (found.name, found.path) == ("ranked", "verl/trainer/ppo/ray_trainer.py")
    assert found.settings["config"] == {
        "algorithm": {"adv_estimator": "ranked", "gamma": 0.5, "ranked": {"scale": 3.0}}
    }
    assert any(
        "ranked is yours: compute_advantage, line 17 of verl/trainer/ppo/ray_trainer.py" in each
        for each in loaded.warnings
    )
    assert not any("algorithm.gamma has no effect" in each for each in loaded.warnings)


@pytest.mark.parametrize(
    ("more", "key", "what"),
    [
        (["+algorithm.ranked.slow=True"], "algorithm.ranked.slow", "computes the advantages of ranked in its loop"),
        (["+algorithm.ranked.scal=3.0"], "algorithm.ranked.scal", "no key algorithm.ranked.scal"),
    ],
)  # fmt: skip
def test_a_key_that_such_an_estimator_cannot_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], key: str, what: str
) -> None:
    problem = read(tmp_path, monkeypatch, *more, estimator="ranked").problems[0]
    assert problem.field == key and what in problem.what


def test_a_column_that_only_its_trainer_computes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = read(tmp_path, monkeypatch, estimator="ranked", more="embeddings")
    (problem,) = name_problems(loaded.config)
    assert "line 17 of verl/trainer/ppo/ray_trainer.py reads embeddings of its batch" in problem.what


def test_further_calls_of_the_loop_are_to_be_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (asked,) = read(tmp_path, monkeypatch, call="batch = keep_the_middle(batch)").unsupported
    assert "calls keep_the_middle (line 8), which verl's does not" in asked.what and "adjust_batch" not in asked.what


@pytest.mark.parametrize(
    "main",
    [
        MAIN.replace("make_worlds(config)", "make_worlds(config, 3)"),  # made in another way
        MAIN.replace("from plays.worlds import", "from elsewhere.worlds import"),  # code that is not here
        MAIN.replace("worlds=worlds", "others=worlds"),  # the loop passes something else
    ],
)
def test_another_interface_is_to_be_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: str) -> None:
    managed_fork(tmp_path)
    (tmp_path / "verl/trainer/main_ppo.py").write_text(main)
    monkeypatch.chdir(tmp_path)
    loaded = load_request(["run.sh"], None, here=True, skip_files=True)
    (asked,) = (each for each in loaded.unsupported if each.field == "RayPPOTrainer.fit")
    assert "passes the sampler to play_all (line 5), which plays episodes of its own" in asked.what
    assert loaded.config.environment.name is None


def test_the_launch_is_the_forks_own(tmp_path: Path) -> None:
    assert "posttrain" not in LAUNCH
