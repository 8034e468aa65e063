"""Whole runs on a tiny model: reproducible, resumable, and stopped for the right reasons."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from posttrain.backends.torch_training import critic as local_critic
from posttrain.backends.torch_training import policy as local_engine
from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.errors import RequestError, RunInterrupted, RunStopped
from posttrain.loops import rl_sync
from posttrain.plan.checks.train import check
from posttrain.run.checkpoint import Checkpoints
from warm.processes import WarmProcess, run

GLOSSARY = Path(__file__).parents[2] / "docs" / "metrics.md"

# Score of a response: a number between 0 and 1 that depends on its text; broken or slow when a file beside it says so.
REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def score(data_source, solution_str, ground_truth, extra_info):
    if (HERE / "slow").exists():
        time.sleep(0.05)
    value = sum(solution_str.encode()) % 5
    if (HERE / "broken").exists() or (value == 4 and (HERE / "sometimes").exists()):
        raise KeyError("no answer")
    return value / 4
"""

Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    """A configuration of six steps of two prompts x three samples, two updates each; keyword arguments change sections."""
    return maker(tmp_path, tiny_llama)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """The folder of a run of ``make("straight")`` that nothing disturbs. Do not write into it."""
    return train_run(maker(tmp_path_factory.mktemp("straight"), tiny_llama)("straight"))


def maker(place: Path, model: Path) -> Make:
    """Write reward and data into a folder. Returns ``make``, whose runs go into folders beside them."""
    (place / "reward.py").write_text(REWARD)
    for name, count in (("train", 10), ("validation", 3)):
        rows = [
            {"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": str(2 * n)}}
            for n in range(count)
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": 1, "total_steps": 6},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {
            "train_files": [str(place / "train.jsonl")],
            "validation_files": [str(place / "validation.jsonl")],
            "prompts_per_step": 2,
        },
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
        "reward": {"workers": 1, "terms": [{"name": "score", "path": str(place / "reward.py")}]},
        "loss": {"kl_coef": 0.01},
        "policy": {
            "sequences_per_mini_batch": 3,
            "sequences_per_micro_batch_per_device": 2,
            "optimizer": {"lr": 1e-3},
            "schedule": {"name": "cosine", "warmup_updates": 2},
        },
        "validation": {"every_steps": 3},
        "checkpoint": {"every_steps": 3},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }

    def make_config(folder: str, **changes: dict[str, Any]) -> RunConfig:
        merged = {name: section | changes.get(name, {}) for name, section in sections.items()}
        merged |= {name: section for name, section in changes.items() if name not in merged}
        merged["run"] = merged["run"] | {"folder": str(place / folder)}
        return RunConfig.model_validate(merged)

    return make_config


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def everywhere(row: dict[str, Any], column: str) -> list[float]:
    """A column of a tokens file: an entry per token, or one value for all."""
    values = row[column]
    return values if isinstance(values, list) else [values] * len(row["token_ids"])


def comparable(folder: Path) -> str:
    """metrics.jsonl without times and speeds, as text."""
    lines = metrics_of(folder)
    kept = [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines]
    return "\n".join(json.dumps(line, sort_keys=True) for line in kept)


def assert_same_result(folder: Path, other: Path) -> None:
    assert comparable(folder) == comparable(other)
    roles = [role for role in ("policy", "critic") if (folder / "checkpoints/global_step_6" / role).exists()]
    for role in roles:
        for name in ("model.safetensors", "optimizer.safetensors", "engine.json"):
            path = f"checkpoints/global_step_6/{role}/{name}"
            assert (folder / path).read_bytes() == (other / path).read_bytes(), path
    for step in range(1, 7):
        assert (folder / f"samples/step_{step}.jsonl").read_bytes() == (
            other / f"samples/step_{step}.jsonl"
        ).read_bytes()


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Do something in the middle of a step, after its update and before anything about it is written."""
    measure, seen = rl_sync.measure, []

    def counted(*args: Any) -> dict[str, float]:
        seen.append(1)
        if len(seen) == step:
            act()
        return measure(*args)

    monkeypatch.setattr(rl_sync, "measure", counted)


class PowerCut(Exception):
    """The process ends without a word."""


def power_cut() -> None:
    raise PowerCut


def test_a_filter_that_draws_more_ends_the_run_with_its_epochs(make: Make, tmp_path: Path) -> None:
    """Half of the prompts score the same whatever is answered, so that two passes of five batches make fewer than ten steps. The
    step that completes the second pass is the last one, with what belongs to it, and a run that is started again has no more."""
    reward = REWARD.replace("return value / 4", "return value / 4 if int(ground_truth) < 10 else 0.0")
    (tmp_path / "half.py").write_text(reward)
    config = make(
        "epochs",
        run={"total_steps": None, "total_epochs": 2},
        reward={"workers": 1, "terms": [{"name": "score", "path": str(tmp_path / "half.py")}]},
        group_filter={"strategy": "refill"},
    )
    folder = train_run(config)
    epochs = [line["progress/epoch"] for line in metrics_of(folder) if "progress/epoch" in line]
    assert 2 < len(epochs) < 10 and epochs[-2] < 2 <= epochs[-1]
    assert (folder / f"checkpoints/global_step_{len(epochs)}").is_dir()
    assert (folder / f"validation/step_{len(epochs)}.jsonl").exists()
    train_run(config)
    assert [line["progress/epoch"] for line in metrics_of(folder) if "progress/epoch" in line] == epochs


# ---------------------------------------------------------------------------------------------- same seed, same run


def test_same_seed_gives_the_same_run_and_another_seed_another(make: Make, straight: Path) -> None:
    torch.randn(7)  # the global random state is not what makes a run
    assert_same_result(train_run(make("second")), straight)
    other = train_run(make("other", run={"seed": 2, "total_steps": 6}))
    assert comparable(other) != comparable(straight)
    assert [line["step"] for line in metrics_of(straight)] == list(range(7))


@pytest.mark.slow
def test_memory_settings_change_numbers_by_rounding_only(make: Make) -> None:
    """Other micro-batches, slots and prefills: the same tokens are sampled, the metrics agree closely."""
    first = train_run(make("first", run={"seed": 1, "total_steps": 2}))
    second = train_run(
        make(
            "second",
            run={"seed": 1, "total_steps": 2},
            rollout={
                "samples_per_prompt": 3,
                "max_response_tokens": 6,
                "max_concurrent_sequences": 2,
                "max_prefill_tokens": 10,
            },
            reference={"sequences_per_micro_batch_per_device": 1},
            model={"path": make("x").model.path, "compute_dtype": "float32", "gradient_checkpointing": True},
        )
    )
    for one, other in zip(metrics_of(first), metrics_of(second), strict=True):
        for name, value in one.items():
            if not name.startswith(("time/", "speed/", "gap/")):
                assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    responses = [
        [json.loads(line)["response"] for line in (folder / "samples/step_2.jsonl").read_text().splitlines()]
        for folder in (first, second)
    ]
    assert responses[0] == responses[1]


# --------------------------------------------------------------------------------------------------------- resuming


def test_run_stopped_by_a_signal_goes_on_as_if_it_had_not_been(
    make: Make, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in step 2, after its update; no checkpoint is due there."""
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(RunInterrupted, match="stopped by SIGTERM after step 2, saved as global_step_2") as raised:
            train_run(make("stopped"))
    assert raised.value.exit_code == 75
    folder = Path(make("stopped").folder)
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2]
    assert_same_result(train_run(make("stopped")), straight)
    assert json.loads((folder / "run.json").read_text())["status"] == "done"


@pytest.mark.slow
def test_signal_during_the_save_of_a_step_is_heeded_in_the_next(
    make: Make, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is saved on schedule; a signal that comes meanwhile stops the run before step 4 has begun."""
    save = Checkpoints.save

    def save_and_signal(self: Checkpoints, step: int, *state: Any, **how: Any) -> str:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return save(self, step, *state, **how)

    monkeypatch.setattr(Checkpoints, "save", save_and_signal)
    with pytest.raises(RunInterrupted, match=r"in step 4, which is made again .* before is saved as global_step_3"):
        train_run(make("run", checkpoint={"every_steps": 3}))
    folder = Path(make("run").folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["global_step_3", "latest", "owner.json"]
    monkeypatch.undo()
    assert_same_result(train_run(make("run")), straight)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_that_died_goes_on_from_its_last_checkpoint(
    make: Make, straight: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Dead in step 5; the checkpoint is of step 3. Steps 4 and 5 are made again, and written once."""
    model = {"path": make("x").model.path, "compute_dtype": dtype}
    if dtype != "float32":
        straight = train_run(make("straight", model=model))
    with monkeypatch.context() as patch:
        at_step(patch, 5, power_cut)
        with pytest.raises(PowerCut):
            train_run(make("died", model=model))
    folder = Path(make("died").folder)
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2, 3, 4]
    assert_same_result(train_run(make("died", model=model)), straight)


PPO: dict[str, dict[str, Any]] = {
    "advantage": {"name": "gae", "gae_lambda": 0.9},
    "critic": {
        "optimizer": {"lr": 3e-3},
        "schedule": {"name": "linear", "warmup_updates": 3},
        "sequences_per_mini_batch": 2,
        "sequences_per_micro_batch_per_device": 3,
        "warmup_steps": 4,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_with_a_critic_that_died_goes_on_from_its_last_checkpoint(
    make: Make, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Dead in step 5, the first one with an update of the policy; the checkpoint is of step 3, while the critic warms up."""
    changes = {**PPO, "model": {"path": make("x").model.path, "compute_dtype": dtype}}
    straight = train_run(make("straight", **changes))
    with monkeypatch.context() as patch:
        at_step(patch, 5, power_cut)
        with pytest.raises(PowerCut):
            train_run(make("died", **changes))
    assert_same_result(train_run(make("died", **changes)), straight)
    counters = [
        json.loads((straight / f"checkpoints/global_step_{step}/{role}/engine.json").read_text())["updates"]
        for role in ("policy", "critic")
        for step in (3, 6)
    ]
    assert counters == [0, 2 * 2, 3 * 3, 6 * 3]  # 2 updates in steps 5 and 6; 6 / 2 in every step


def test_the_policy_stays_as_it_is_while_the_critic_warms_up(make: Make) -> None:
    """Warm-up steps are no skipped steps: one of those in a row would stop this run."""
    folder = train_run(
        make("run", run={"total_steps": 6, "max_skipped_steps": 1}, checkpoint={"every_steps": 1}, **PPO)
    )
    lines = {line["step"]: line for line in metrics_of(folder)}
    for step in range(1, 7):
        assert ("policy/loss" in lines[step]) is ("speed/update_tokens_per_s" in lines[step]) is (step > 4)
        assert lines[step]["critic/loss"] > 0 and lines[step]["critic/skipped_updates"] == 0
    weights = [
        {
            role: (folder / f"checkpoints/global_step_{step}/{role}/model.safetensors").read_bytes()
            for role in ("policy", "critic")
        }
        for step in (3, 4, 5)
    ]
    assert weights[0]["policy"] == weights[1]["policy"] != weights[2]["policy"]
    assert len({each["critic"] for each in weights}) == 3
    samples = [json.loads(line) for line in (folder / "samples/step_5.jsonl").read_text().splitlines()]
    assert {sample["policy_version"] for sample in samples} == {0}


def test_a_critic_whose_loss_is_not_finite_stops_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy could go on with a critic that learns nothing, and nobody would see it."""
    aggregate = local_critic.aggregate
    monkeypatch.setattr(local_critic, "aggregate", lambda *args, **how: aggregate(*args, **how) * float("nan"))
    config = make("run", run={"total_steps": 6, "max_skipped_steps": 2}, advantage={"name": "gae"})
    with pytest.raises(RunStopped, match="2 steps in a row made no update"):
        train_run(config)
    lines = metrics_of(Path(config.folder))
    assert [line.get("critic/skipped_updates") for line in lines] == [None, 2.0, 2.0]
    assert [line.get("policy/skipped_updates") for line in lines] == [None, 0.0, 0.0]


def test_going_on_with_a_critic_where_there_was_none(make: Make) -> None:
    train_run(make("run", run={"total_steps": 1}))
    with pytest.raises(RequestError, match="was saved by a run without a critic, and this run needs one; name another"):
        train_run(make("run", run={"total_steps": 2}, advantage={"name": "gae"}), allow_config_change=True)


def test_a_critic_that_reads_other_token_ids_is_refused(make: Make, tmp_path: Path, tiny_llama: Path) -> None:
    """Its tokenizer has two bytes the other way round; its embedding is one token short; it has too few positions."""
    other = edited_model(tiny_llama, tmp_path / "other", vocab_size=258, max_position_embeddings=28)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RequestError) as caught:
        train_run(make("run", advantage={"name": "gae"}, critic={"path": str(other)}))
    text = str(caught.value)
    assert {problem.field for problem in caught.value.problems} == {"critic.path"}
    assert "the policy's tokenizer has 259 tokens, and the critic knows 258" in text
    assert "the critic's token ids are not the policy's: 2 tokens differ, such as 'a'" in text
    assert "make up to 29 tokens, which do not fit into the 28 positions of the critic" in text  # 23 + 6, as below
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_damaged_newest_checkpoint_is_passed_over_and_named(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train_run(make("run", tracking={"trackers": ["console"]}))
    before = comparable(folder)
    weights = folder / "checkpoints/global_step_6/policy/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    capsys.readouterr()
    train_run(make("run", tracking={"trackers": ["console"]}))
    shown = "".join(capsys.readouterr())
    assert "global_step_6 is damaged (policy/model.safetensors has changed)" in shown
    assert "from step 4" in shown
    assert comparable(folder) == before
    assert weights.read_bytes() == content


@pytest.mark.slow
def test_finished_run_started_again_changes_nothing(make: Make) -> None:
    folder = train_run(make("run"))
    before = (folder / "metrics.jsonl").read_bytes()
    train_run(make("run"))
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_finished_run_can_be_made_longer(make: Make) -> None:
    constant = {
        "sequences_per_mini_batch": 3,
        "sequences_per_micro_batch_per_device": 2,
        "optimizer": {"lr": 1e-3},
        "schedule": {"name": "constant", "warmup_updates": 2},
    }
    straight = train_run(make("straight", policy=constant, validation={"after_training": False}))
    train_run(make("grown", policy=constant, run={"total_steps": 3}, validation={"after_training": False}))
    grown = train_run(make("grown", policy=constant, validation={"after_training": False}))
    assert_same_result(grown, straight)


@pytest.mark.slow
def test_a_run_that_only_validates_makes_no_step_and_no_checkpoint(make: Make, straight: Path) -> None:
    """Its numbers are those that the same run has before its first step; training may follow in the same folder."""
    config = make("only", validation={"only": True})
    folder = Path(config.folder)
    for _ in range(2):
        train_run(config)
        assert [line["step"] for line in metrics_of(folder)] == [0]
        kept = ("time/", "speed/")
        now, before = (
            {k: v for k, v in metrics_of(one)[0].items() if not k.startswith(kept)} for one in (folder, straight)
        )
        assert now == before and "validation/sums/reward_mean" in now
        assert not list(folder.glob("checkpoints/global_step_*"))
        assert (folder / "validation" / "step_0.jsonl").exists() and not (folder / "samples").exists()
    train_run(make("only", run={"total_steps": 1}))
    assert [line["step"] for line in metrics_of(folder)] == [0, 1]
    train_run(make("only", validation={"only": True}))
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 1]
    assert metrics_of(folder)[2].keys() < metrics_of(folder)[1].keys()


@pytest.mark.slow
def test_a_run_that_only_validates_needs_no_training_data(make: Make, straight: Path) -> None:
    """Its numbers are those of a run that has some."""
    config = make("bare", validation={"only": True}, data={"train_files": []})
    assert not check(config)
    train_run(config)
    [line] = metrics_of(Path(config.folder))
    found = {name: value for name, value in line.items() if name.startswith("validation/")}
    wanted = {name: value for name, value in metrics_of(straight)[0].items() if name.startswith("validation/")}
    assert found == wanted and found
    [problem] = check(make("none", data={"train_files": []}))
    assert problem.field == "data.train_files"


def test_used_folder_is_refused_without_resuming(make: Make) -> None:
    train_run(make("run", run={"total_steps": 1}))
    before = sorted((path, path.stat().st_mtime_ns) for path in Path(make("run").folder).rglob("*"))
    with pytest.raises(RequestError, match=r"already holds a run; name another run\.folder, or set run.resume=auto"):
        train_run(make("run", run={"total_steps": 1, "resume": "never"}))
    assert sorted((path, path.stat().st_mtime_ns) for path in Path(make("run").folder).rglob("*")) == before


def test_other_data_order_is_refused_when_resuming(make: Make) -> None:
    folder = train_run(make("run", run={"total_steps": 3}))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RequestError, match=r"seed = 1, and this run has 2"):
        train_run(make("run", run={"total_steps": 6, "seed": 2}), allow_config_change=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_only_the_newest_checkpoints_are_kept(make: Make) -> None:
    folder = train_run(make("run", checkpoint={"every_steps": 1, "keep_last": 2}))
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["global_step_5", "global_step_6", "latest", "owner.json"]
    assert (folder / "checkpoints/latest").read_text() == "global_step_6\n"


# ----------------------------------------------------------------------------------- runs that have to end themselves


def test_reward_that_always_fails_stops_the_run(make: Make, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(RunStopped) as raised:
        train_run(make("run", validation={"before_training": False}))
    text = str(raised.value)
    assert raised.value.exit_code == 3
    assert "6 of 6 responses have no valid reward, more than reward.max_invalid_share = 0.5 allows" in text
    assert "exception: score:" in text and "KeyError: 'no answer'" in text and "reward.py:" in text
    assert text.endswith("Last good checkpoint: none was saved")
    assert json.loads((Path(make("run").folder) / "run.json").read_text())["status"] == "stopped"


def test_loss_that_is_not_finite_stops_the_run_before_it_touches_the_weights(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = local_engine.policy_objective
    seen: list[int] = []

    def spoiled(*args: Any) -> Any:
        """NaN from the second step on: a step has two mini-batches of two micro-batches each."""
        seen.append(1)
        loss, sums = objective(*args)
        return (loss * float("nan") if len(seen) > 4 else loss), sums

    monkeypatch.setattr(local_engine, "policy_objective", spoiled)
    config = make("run", run={"total_steps": 6, "max_skipped_steps": 2}, checkpoint={"every_steps": 1})
    with pytest.raises(RunStopped) as raised:
        train_run(config)
    text = str(raised.value)
    assert "2 steps in a row made no update (step 3 was the last)" in text
    assert "Last good checkpoint: global_step_1" in text  # that of step 2 holds the same weights, and no update
    folder = Path(config.folder)
    assert [line.get("policy/skipped_updates") for line in metrics_of(folder)] == [None, 0.0, 2.0, 2.0]
    assert (folder / "samples/step_3.jsonl").exists()
    first, second = (folder / f"checkpoints/global_step_{n}/policy/model.safetensors" for n in (1, 2))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_starting_a_dead_run_again_and_again_neither_ends_it_nor_loses_its_last_good_checkpoint(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 2 on no update can be made, steps 2 and 3 are saved, and step 4 is the third without one; so it is in every
    process that goes on from step 3."""
    objective, seen = local_engine.policy_objective, list[int]()

    def spoiled(*args: Any) -> Any:
        seen.append(1)
        loss, sums = objective(*args)
        return (loss * float("nan") if len(seen) > 4 else loss), sums

    monkeypatch.setattr(local_engine, "policy_objective", spoiled)
    config = make("run", run={"total_steps": 6, "max_skipped_steps": 3}, checkpoint={"every_steps": 1, "keep_last": 1})
    for _ in range(3):
        with pytest.raises(RunStopped) as raised:
            train_run(config)
        assert "3 steps in a row made no update (step 4 was the last)" in str(raised.value)
        assert "Last good checkpoint: global_step_1" in str(raised.value)
        left = sorted(path.name for path in (Path(config.folder) / "checkpoints").glob("global_step_*"))
        assert left == ["global_step_1", "global_step_3"]


def test_samples_of_a_failed_step_are_written_even_when_not_due(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = local_engine.policy_objective
    monkeypatch.setattr(
        local_engine, "policy_objective", lambda *args: (objective(*args)[0] * float("nan"), objective(*args)[1])
    )
    config = make(
        "run", run={"max_skipped_steps": 1, "total_steps": 6}, tracking={"trackers": [], "samples_every_steps": None}
    )
    with pytest.raises(RunStopped, match=r"in samples/step_1\.jsonl"):
        train_run(config)
    assert (Path(config.folder) / "samples/step_1.jsonl").exists()


def test_weights_that_blow_up_stop_the_run(make: Make) -> None:
    """By a rate beyond the largest that a configuration takes, so that one update is enough."""
    config = make("run", policy={"optimizer": {"max_grad_norm": None}})
    optimizer = config.policy.optimizer.model_copy(update={"lr": 1e30})
    policy = config.policy.model_copy(update={"optimizer": optimizer})
    with pytest.raises(RunStopped, match="not finite"):
        train_run(config.model_copy(update={"policy": policy}))


# ------------------------------------------------------------------------------------------------ what a run leaves


@pytest.mark.slow
def test_prompt_that_comes_again_gets_other_random_numbers(make: Make) -> None:
    """Ten prompts in a file, two steps of ten: an epoch each, with weights that hardly move."""
    folder = train_run(
        make(
            "run",
            run={"total_steps": 2},
            data={**make("x").data.model_dump(), "prompts_per_step": 10},
            policy={"optimizer": {"lr": 1e-12}},
        )
    )
    first, second = (
        {s["sample_id"]: s["response"] for s in map(json.loads, (folder / f"samples/step_{n}.jsonl").open())}
        for n in (1, 2)
    )
    assert first.keys() == second.keys() and len(first) == 30
    assert sum(first[name] == second[name] for name in first) <= 2


def test_samples_hold_what_happened(make: Make, tmp_path: Path) -> None:
    (tmp_path / "sometimes").touch()
    config = make(
        "run",
        run={"seed": 3, "total_steps": 4},
        reward={
            "workers": 1,
            "terms": [{"name": "score", "path": str(tmp_path / "reward.py"), "weight": 2.0}],
            "max_invalid_share": 1.0,
        },
        validation={"trainer_logprobs": True},
    )
    folder = train_run(config)
    metrics = metrics_of(folder)
    invalid_seen = 0
    for step in (0, 4):
        rows = [json.loads(line) for line in (folder / f"validation/step_{step}.tokens.jsonl").read_text().splitlines()]
        assert [row["line"] for row in rows[1:]] == [0, 1, 2]
        logprobs = [value for row in rows[1:] for value in everywhere(row, "rollout_logprobs")]
        gaps = [value for row in rows[1:] for value in everywhere(row, "gap")]
        assert -5 < min(logprobs) < max(logprobs) < -0.01 and max(map(abs, gaps)) < 1e-4
    for step in range(1, 5):
        samples = [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]
        assert len(samples) == len({sample["sample_id"] for sample in samples}) == 6
        assert {sample["policy_version"] for sample in samples} == {2 * (step - 1)}  # two updates per step
        groups: dict[str, list[dict[str, Any]]] = {}
        for sample in samples:
            assert sample["step"] == step and sample["data_source"] == "sums"
            assert sample["prompt"].startswith("<|im_start|>user\n")
            assert 1 <= sample["response_tokens"] <= 6
            assert sample["stop_reason"] == ("length" if sample["response_tokens"] == 6 else "eos")
            assert (sample["reward"] is None) == (sample["advantage"] is None) == (sample["invalid"] is not None)
            if sample["reward"] is None:
                assert sample["invalid"]["reason"] == "exception"
                invalid_seen += 1
            else:
                assert sample["reward"] == 2 * sample["reward_terms"]["score"]
                groups.setdefault(sample["prompt_id"], []).append(sample)
        for group in groups.values():
            advantages = [sample["advantage"] for sample in group]
            assert sum(advantages) == pytest.approx(0, abs=1e-5)
            if len({sample["reward"] for sample in group}) == 1:
                assert advantages == [0.0] * len(group)
            else:
                best = max(group, key=lambda sample: sample["reward"])
                assert best["advantage"] == max(advantages) > 0
        line = metrics[step]
        rewards = [sample["reward"] for group in groups.values() for sample in group]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert line["reward/invalid_share"] == pytest.approx((6 - len(rewards)) / 6)
        assert line["step/response_tokens"] == sum(sample["response_tokens"] for sample in samples)
        assert line["gap/max"] < 1e-4
    assert invalid_seen > 0


def test_saved_configuration_is_the_run_again(make: Make) -> None:
    config = make("run", run={"total_steps": 1})
    folder = train_run(config)
    assert RunConfig.model_validate(yaml.safe_load((folder / "config.yaml").read_text())) == config


def test_every_logged_metric_is_in_the_glossary_and_nothing_else_is(make: Make, tmp_path: Path) -> None:
    """A run with everything on, and one of what does not go with that. <placeholders> in the glossary stand for any name."""
    (tmp_path / "sometimes").touch()
    correction = {"weights": "token", "reject": ["token_k3"], "reject_bounds": ["5.0"]}
    loss = {
        "kl_coef": 0.01,
        "entropy_coef": 0.01,
        "dual_clip": 3.0,
        "sft_coef": 0.1,
        "topr_coef": 0.1,
        "rollout_correction": correction,
    }
    reward = {
        "workers": 1,
        "terms": [{"name": "score", "path": str(tmp_path / "reward.py")}],
        "max_invalid_share": 1.0,
        "normalize_mean": "running",
        "clip": 2.0,
        "kl": {"coef": 0.01},
    }
    folder = train_run(
        make(
            "run",
            run={"seed": 3, "total_steps": 3},
            loss=loss,
            reward=reward,
            advantage={"name": "gae"},
            group_filter={"strategy": "refill"},
            resampling={"weights": "power"},
            validation={"samples_per_prompt": 2, "temperature": 1.0},
        )
    )
    domains = {"sums": {"sources": ["sums"], "prompts_per_step": 2}}
    greedy = train_run(make("greedy", run={"total_steps": 1}, advantage={"name": "remax"}, data={"domains": domains}))
    some_tokens = train_run(
        make(
            "some_tokens",
            run={"total_steps": 1},
            model={"compute_dtype": "float16"},
            loss={"kl_coef": 0.01, "high_entropy_share": 0.5, "off_policy_limit": 0.1},
            reference={"update_every": 1},
            advantage={"name": "gae"},
        )
    )
    token_rewards = train_run(
        make(
            "token_rewards",
            run={"total_steps": 4},  # the first updates may find the scale of float16 too large, and are then skipped
            model={"compute_dtype": "float16"},
            loss={"name": "sppo"},
            reward={"workers": 1, "terms": reward["terms"], "process": {}},
            advantage={"name": "prime"},
        )
    )
    lines = [line for run in (folder, greedy, some_tokens, token_rewards) for line in metrics_of(run)]
    logged = {name for line in lines for name in line} - {"step", "nonfinite"}
    documented = re.findall(
        r"^\| `([^`]+)` \|",
        GLOSSARY.read_text(encoding="utf-8").partition("## Supervised fine-tuning")[0],
        re.MULTILINE,
    )
    patterns = {name: re.compile(re.sub(r"<\w+>", "[^/]+", name)) for name in documented}
    assert [name for name in sorted(logged) if not any(p.fullmatch(name) for p in patterns.values())] == []
    with_a_server = {name for name in patterns if name.startswith("reward/cost/")}  # test_served.py has one
    with_copies = {"speed/weight_sync_mib"}  # of a sampler elsewhere: test_ray_adapters.py
    with_answers = {"validation/<data_source>/reward_maj@<k>"}  # test_validate.py has a reward that names its answers
    of_worlds = (
        "episode/",
        "environment/",
        "validation/<data_source>/turns_mean",
        "validation/<data_source>/environment/",
    )
    with_worlds = {
        name for name in patterns if name.startswith(of_worlds)
    }  # runs with environments have tests of their own
    waits = {f"time/{who}_waited_{unit}" for who in ("trainer", "samplers") for unit in ("s", "share")}
    ahead = (
        {name for name in patterns if name.startswith("async/")} | {"step/sampled_tokens"} | waits
    )  # test_async_runs.py
    ahead |= {"policy/importance_weight"}  # of log-probs that are interpolated by version
    with_teachers = {"distillation/divergence", "time/teachers_s"}  # test_taught_runs.py
    in_background = {"time/checkpoint_wait_s"}  # a save that the next step's updates had to wait for
    with_curriculum = {name for name in patterns if name.startswith("curriculum/")}  # test_curriculum.py
    with_experts = {"policy/router_balance"}  # test_balanced_experts.py
    unlogged = {name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, logged))}
    assert (
        unlogged
        - with_experts
        - with_curriculum
        - with_teachers
        - with_a_server
        - with_copies
        - with_answers
        - with_worlds
        - in_background
        - ahead
        == set()
    )


# ----------------------------------------------------------------------------------------------- as a command


@pytest.mark.slow
def test_command_stopped_by_sigterm_exits_75_and_finishes_when_started_again(make: Make, tmp_path: Path) -> None:
    config = make("run", run={"total_steps": 8}, validation={"before_training": False})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-c", "from posttrain.cli.app import main; main()", "train", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = Path(config.folder)

    (tmp_path / "slow").touch()
    process = WarmProcess(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not ((folder / "metrics.jsonl").exists() and metrics_of(folder)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "stopped by SIGTERM" in output
    done = metrics_of(folder)[-1]["step"]
    assert done < 8
    assert (folder / "checkpoints/latest").read_text() == f"global_step_{done}\n"

    (tmp_path / "slow").unlink()
    finished = run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, 9))
    assert json.loads((folder / "run.json").read_text())["status"] == "done"


def test_samples_of_the_step_whose_rewards_broke_are_kept(make: Make, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(RunStopped, match="6 of 6 responses have no valid reward"):
        train_run(make("run", validation={"before_training": False}))
    samples = [json.loads(line) for line in (tmp_path / "run/samples/step_1.jsonl").read_text().splitlines()]
    assert [sample["invalid"]["reason"] for sample in samples] == ["exception"] * 6


def test_a_finished_run_says_that_nothing_is_left(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"run": {"total_steps": 1}, "tracking": {"trackers": ["console"]}}
    folder = train_run(make("run", **changes))
    before = (folder / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    train_run(make("run", **changes))
    said = "nothing is left to do: step 1 is done and 1 are requested; raise run.total_steps or run.total_epochs to continue"
    assert said in " ".join("".join(capfd.readouterr()).split())
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_signal_during_the_first_validation_does_not_wait_for_a_step(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = rl_sync.validate

    def interrupted(*args: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGTERM)
        return validate(*args)

    monkeypatch.setattr(rl_sync, "validate", interrupted)
    with pytest.raises(RunInterrupted, match="stopped by SIGTERM before the first step"):
        train_run(make("run"))
    assert metrics_of(tmp_path / "run") == []


def test_a_second_signal_in_a_step_names_the_last_good_checkpoint(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 4, twice)
    with pytest.raises(KeyboardInterrupt):
        train_run(make("run", tracking={"trackers": ["console"]}))
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "stopped at once, in the middle of a step. Last good checkpoint: global_step_3" in shown
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "interrupted"


def edited_model(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model folder with another config.json."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.slow
def test_prompt_and_response_must_fit_into_the_models_positions(make: Make, tmp_path: Path, tiny_llama: Path) -> None:
    # ChatML around "9+9=" is one byte a token: <|im_start|>user\n (6) 9+9= (4) <|im_end|>\n (2) <|im_start|>assistant\n (11)
    prompt = 6 + 4 + 2 + 11
    fits = edited_model(tiny_llama, tmp_path / "fits", max_position_embeddings=prompt + 6)
    train_run(make("fits_run", model={"path": str(fits)}, run={"total_steps": 1}))
    short = edited_model(tiny_llama, tmp_path / "short", max_position_embeddings=prompt + 5)
    with pytest.raises(RequestError) as caught:
        train_run(make("short_run", model={"path": str(short)}))
    assert [problem.field for problem in caught.value.problems] == [
        "rollout.max_response_tokens",
        "rollout.max_response_tokens",  # validation has no limit of its own here
    ]
    said = "prompt (23 tokens) and a response of up to 6 do not fit into the 28 positions of the model"
    assert f"the longest training {said}" in str(caught.value)
    assert not (tmp_path / "short_run").exists()
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    longer = edited_model(tiny_llama, tmp_path / "longer", max_position_embeddings=prompt + 5, rope_parameters=scaled)
    train_run(make("longer_run", model={"path": str(longer)}, run={"total_steps": 1}))


def test_a_tokenizer_of_another_model(make: Make, tmp_path: Path, tiny_llama: Path) -> None:
    few = edited_model(tiny_llama, tmp_path / "few", vocab_size=100)
    with pytest.raises(RequestError, match="the tokenizer makes token id 258, and the model knows 100 tokens; use the"):
        train_run(make("run", model={"path": str(few)}))
    assert not (tmp_path / "run").exists()
