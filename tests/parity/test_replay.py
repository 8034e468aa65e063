"""A recorded step done again, part by part: the same numbers, the same words, the same rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.replay import replay_rewards, replay_rollout, replay_train
from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.errors import RequestError
from posttrain.report.read import read_run

REWARD = (
    "def score(data_source, solution_str, ground_truth, extra_info):\n    return (sum(solution_str.encode()) % 5) / 4\n"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> RunConfig:
    """A finished run of three steps with two updates each, a critic, running rewards and a KL; saved after steps 1 and 3."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "0"}} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "run": {"seed": 1, "total_steps": 3, "folder": str(folder / "run")},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "validation_files": [str(folder / "train.jsonl")],
            "prompts_per_step": 2,
        },
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6, "replay_folder": str(folder / "kept")},
        "reward": {
            "workers": 1,
            "terms": [{"name": "score", "path": str(folder / "reward.py")}],
            "normalize_std": "running",
            "kl": {"coef": 0.1},
        },
        "advantage": {"name": "gae"},
        "policy": {"sequences_per_mini_batch": 3, "optimizer": {"lr": 1e-3}, "schedule": {"name": "cosine"}},
        "validation": {"max_prompts": 2},
        "checkpoint": {"every_steps": 2},
        "tracking": {"trackers": [], "batches_every_steps": 1},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    config = RunConfig.model_validate(sections)
    train_run(config)
    return config


def changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    given = config.model_dump()
    return RunConfig.model_validate(given | {name: given[name] | changes for name, changes in sections.items()})


def folder_of(config: RunConfig) -> Path:
    return Path(config.folder)


@pytest.mark.parametrize(
    "step", [1, 2, 3, None]
)  # from the starting weights; with a step on the way; from a checkpoint
def test_learning_again_gives_the_same_numbers(config: RunConfig, step: int | None) -> None:
    number, found = replay_train(folder_of(config), config, step)
    assert number == (step or 3)
    assert {"policy/loss", "policy/grad_norm", "critic/loss", "gap/mean", "reward/kl"} <= {one.name for one in found}
    assert len(found) > 20
    assert [one for one in found if not one.same] == []


def test_a_change_of_the_update_shows(config: RunConfig) -> None:
    _, found = replay_train(folder_of(config), changed(config, policy={"sequences_per_mini_batch": 6}), 3)
    other = {one.name for one in found if not one.same}
    assert "policy/kl_old" in other and "gap/mean" not in other  # what was sampled is as it was


def test_what_was_not_recorded_is_told(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no recorded batch .*step_4.*there are steps 1, 2, 3"):
        replay_train(folder_of(config), config, 4)
    with pytest.raises(RequestError, match="does not exist"):
        replay_train(tmp_path / "nowhere", config, 1)


@pytest.mark.parametrize("step", [1, 3])
def test_sampling_again_gives_the_same_words(config: RunConfig, step: int) -> None:
    found = replay_rollout(folder_of(config), config, step)
    assert len(found) == 6 and all(one.same for one in found)
    assert {one.name.rpartition("/")[2] for one in found} == {"0", "1", "2"}


def test_sampling_needs_the_weights_of_then(config: RunConfig) -> None:
    with pytest.raises(RequestError, match="no checkpoint of step 1, which step 2 began with; steps that begin at a"):
        replay_rollout(folder_of(config), config, 2)


@pytest.mark.parametrize(("step", "validation", "count"), [(2, False, 6), (3, True, 2)])
def test_scoring_again_gives_the_same_rewards(config: RunConfig, step: int, validation: bool, count: int) -> None:
    found = replay_rewards(folder_of(config), config, step, validation=validation)
    assert len(found) == count and all(one.same for one in found)


def test_another_reward_shows_in_every_sample(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def score(**_):\n    raise KeyError('no answer')\n")
    other = changed(config, reward={"terms": [{"name": "score", "path": str(tmp_path / "other.py")}]})
    found = replay_rewards(folder_of(config), other, 2)
    assert [one.now for one in found] == ["invalid: exception"] * 6 and not any(one.same for one in found)
    with pytest.raises(RequestError, match=r"no samples of a training at step 9; there are those of steps 1, 2, 3"):
        replay_rewards(folder_of(config), config, 9)
    (tmp_path / "one.jsonl").write_text(json.dumps({"data_source": "sums", "prompt": "1+1=", "answer": "2"}))
    with pytest.raises(RequestError, match=r"prompts of these samples are not in the data files, such as train.jsonl:"):
        replay_rewards(folder_of(config), changed(config, data={"train_files": [str(tmp_path / "one.jsonl")]}), 2)


def test_kept_responses_are_trained_on_without_sampling(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs with another learning rate read the same responses in all steps, where they would sample others from step 2 on;
    the sampler is as far from the trainer in the first step, and no longer in the last."""
    monkeypatch.setattr("posttrain.loops.rl_sync.collect", None)  # called by no step
    other = changed(
        config,
        run={"folder": str(tmp_path / "run")},
        policy={"optimizer": {"lr": 1e-2}},
        data={"validation_files": []},
        tracking={"batches_every_steps": None},
    )
    train_run(other)
    for step in (1, 2, 3):
        first, again = (responses_of(folder_of(one), step) for one in (config, other))
        assert first == again and len(first) == 6
    gaps = [read_run(folder_of(one)).metrics for one in (config, other)]
    assert gaps[0][1]["gap/mean"] == gaps[1][1]["gap/mean"]
    assert gaps[0][3]["gap/mean"] != gaps[1][3]["gap/mean"]


def test_a_step_sampled_ahead_is_kept_as_well(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one_step are those of weights one version older; the second run reads them in every step."""
    ahead = changed(
        config,
        run={"folder": str(tmp_path / "run")},
        rollout={"replay_folder": str(tmp_path / "kept")},
        data={"validation_files": []},
        tracking={"batches_every_steps": None},
        asynchronous={"mode": "one_step"},
        checkpoint={"every_steps": None},
    )
    train_run(ahead)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [f"step_{n}.jsonl" for n in (1, 2, 3)]
    for name in ("collect", "respond"):
        monkeypatch.setattr(f"posttrain.steps.one_step.{name}", lambda *_: pytest.fail("the step was sampled"))
    again = changed(ahead, run={"folder": str(tmp_path / "again")}, policy={"optimizer": {"lr": 1e-2}})
    train_run(again)
    for step in (1, 2, 3):
        first, second = (responses_of(folder_of(one), step) for one in (ahead, again))
        assert first == second and len(first) == 6
    assert responses_of(folder_of(ahead), 3) != responses_of(folder_of(config), 3)  # which the newest weights sampled


def responses_of(folder: Path, step: int) -> list[str]:
    return [json.loads(row)["response"] for row in (folder / "samples" / f"step_{step}.jsonl").read_text().splitlines()]
