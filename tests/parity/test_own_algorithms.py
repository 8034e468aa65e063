"""A loss and an estimator from the user's own file, with a setting of their own: planned, trained with, kept and compared."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.build.train import train_run
from posttrain.cli.request import check_request, load_request
from posttrain.dialects.detect import read_config
from posttrain.dialects.native.loader import read
from posttrain.errors import ConfigError, RunStopped

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4
"""
LOSS = '''
import torch
from posttrain.settings import Positive


def scaled_gradient(policy_logprobs, old_logprobs, advantages, mask, *, scale: Positive = 1.0):
    """-scale A log pi per token.

    Settings:
        scale: factor of every token's loss.
    """
    loss = -scale * torch.where(mask, advantages, 0.0) * torch.where(mask, policy_logprobs, 0.0)
    return loss, {"seen": mask.float()}
'''
ADVANTAGE = '''
import torch
from posttrain.registry import ADVANTAGES


@ADVANTAGES.register("above", compares_responses=True)
def above(rewards, valid, group_index, response_mask, *, margin: float = 0.0):
    """A = r - margin.

    Settings:
        margin: what a response must bring to be raised.
    """
    return torch.where(response_mask & valid[:, None], (rewards - margin)[:, None], 0.0).float()
'''

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def forget_own_names() -> Iterator[None]:
    """Other tests of this process see the package's own names alone."""
    registries = [each for each in vars(registry).values() if isinstance(each, registry.Registry)]
    before = [each.names() for each in registries]
    yield
    for each, names in zip(registries, before, strict=True):
        for held in (each._entries, each._stated, each._plugged):
            for name in set(held) - set(names):
                del held[name]


@pytest.fixture
def overrides(tmp_path: Path, tiny_llama: Path) -> list[str]:
    for name, text in {"reward.py": REWARD, "mine.py": LOSS, "own.py": ADVANTAGE}.items():
        (tmp_path / name).write_text(text)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "0"}} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={tiny_llama}",
        "model.compute_dtype=float32",
        f"data.train_files=[{tmp_path}/train.jsonl]",
        "data.prompts_per_step=2",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=8",
        f"reward.terms=[{{name: score, path: {tmp_path}/reward.py}}]",
        "policy.optimizer.lr=1e-3",
        "tracking.trackers=[]",
        "placement.device=cpu",
        "placement.cpu_threads=1",
        "run.seed=1",
        "run.total_steps=2",
        f"run.folder={tmp_path}/run",
    ]


def planned(overrides: list[str], *more: str) -> Any:
    return check_request(read(None, [*overrides, *more]), look_at_files=True).loaded.config


def problems(overrides: list[str], *more: str) -> list[str]:
    return [str(problem) for problem in read(None, [*overrides, *more]).problems]


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 0]


def test_a_loss_in_a_file_is_planned_and_trained_with(overrides: list[str], tmp_path: Path) -> None:
    config = planned(overrides, f"loss.path={tmp_path}/mine.py", "loss.name=scaled_gradient", "loss.scale=2")
    assert config.loss.settings == {"scale": 2.0}
    twice = steps(train_run(config))
    shutil.rmtree(tmp_path / "run")
    once = steps(train_run(planned(overrides, f"loss.path={tmp_path}/mine.py", "loss.name=scaled_gradient")))
    assert len(twice) == len(once) == 2
    assert twice[0]["policy/grad_norm"] == pytest.approx(2 * once[0]["policy/grad_norm"], rel=1e-4)
    assert twice[0]["policy/seen"] == 1


def test_an_estimator_in_a_file_is_planned_and_trained_with(overrides: list[str], tmp_path: Path) -> None:
    own = (f"advantage.path={tmp_path}/own.py", "advantage.name=above", "advantage.margin=0.25")
    folder = train_run(planned(overrides, *own))
    assert len(steps(folder)) == 2
    for line in (folder / "samples/step_1.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["advantage"] == pytest.approx(sample["reward"] - 0.25, abs=1e-5)


def test_a_loss_that_is_never_finite_ends_the_run_by_its_name(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS.replace("return loss", "return (-1 - loss * 0).sqrt()"))
    config = planned(overrides, f"loss.path={tmp_path}/mine.py", "loss.name=scaled_gradient", "run.max_skipped_steps=2")
    with pytest.raises(RunStopped, match=r"2 steps in a row made no update") as stopped:
        train_run(config)
    assert f"{tmp_path}/mine.py:6: the policy loss scaled_gradient returned nan for " in str(stopped.value)


def test_an_estimator_that_is_never_finite_ends_the_run_by_its_name(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ADVANTAGE.replace("rewards - margin", "rewards / 0 - rewards / 0"))
    own = (f"advantage.path={tmp_path}/own.py", "advantage.name=above", "run.max_skipped_steps=1")
    with pytest.raises(RunStopped, match=r"own\.py:6: the advantage estimator above returned nan for "):
        train_run(planned(overrides, *own))
    lines = (tmp_path / "run/samples/step_1.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line)["advantage"] is None for line in lines)


def test_its_facts_inputs_and_settings_are_checked_without_running_it(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')\n" + LOSS)
    own = (f"loss.path={tmp_path}/mine.py", "loss.name=scaled_gradient")
    assert problems(overrides, *own) == []
    [unknown] = problems(overrides, *own, "loss.scael=2")
    assert "there is no key loss.scael" in unknown and "did you mean loss.scale?" in unknown
    [bounds] = problems(overrides, *own, "loss.scale=-1")
    assert "scale must be above 0, not -1" in bounds
    [missing] = problems(overrides, own[0], "loss.name=scaled_gradeint")
    assert "defines no function 'scaled_gradeint'" in missing and "did you mean scaled_gradient?" in missing
    [absent] = problems(overrides, f"loss.path={tmp_path}/other.py", "loss.name=scaled_gradient")
    assert "there is no file" in absent
    (tmp_path / "mine.py").write_text(LOSS.replace("old_logprobs", "old_logprob"))
    [wrong] = problems(overrides, *own)
    assert "takes old_logprob, which is no input of a policy loss" in wrong and "did you mean old_logprobs?" in wrong
    one = (f"advantage.path={tmp_path}/own.py", "advantage.name=above", "rollout.samples_per_prompt=1")
    assert any("above compares the samples of a prompt" in text for text in problems(overrides, *one))


def test_a_setting_that_must_be_given_is_asked_for(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS.replace("Positive = 1.0", "Positive"))
    own = (f"loss.path={tmp_path}/mine.py", "loss.name=scaled_gradient")
    [problem] = problems(overrides, *own)
    assert "scaled_gradient needs loss.scale" in problem and "factor of every token's loss" in problem
    assert problems(overrides, *own, "loss.scale=1") == []


@pytest.mark.slow
def test_the_run_keeps_the_file_and_notices_another_content(overrides: list[str], tmp_path: Path) -> None:
    own = (f"loss.path={tmp_path}/mine.py", "loss.name=scaled_gradient")
    folder = train_run(planned(overrides, *own, "run.total_steps=1"))
    about = json.loads((folder / "run.json").read_text())["own_files"]
    assert set(about) == {"data.train_files.0", "loss.path", "reward.terms.0.path"}
    assert (folder / about["loss.path"]["copy"]).read_text() == LOSS
    config = planned(overrides, *own, "run.total_steps=2")
    (tmp_path / "mine.py").write_text(LOSS + "# another\n")
    with pytest.raises(ConfigError, match=r"had loss\.path .*mine\.py \(code/mine\.\w+\.py\), and this one has"):
        train_run(config)
    train_run(config, allow_config_change=True)
    run = json.loads((folder / "run.json").read_text())
    assert [text for text in run["resumes"][-1]["changed"] if text.startswith("loss.path")]
    assert (folder / about["loss.path"]["copy"]).read_text() == LOSS
    assert (folder / run["own_files"]["loss.path"]["copy"]).read_text() == LOSS + "# another\n"


FORK = """
import torch
import verl.utils.torch_functional as verl_F
from verl.workers.actor.weights import factor


def compute_doubled_outcome_advantage(token_level_rewards: torch.Tensor, eos_mask: torch.Tensor, index, times: float):
    with torch.no_grad():
        scores = times * factor() * token_level_rewards.sum(dim=-1, keepdim=True) * eos_mask
    return scores, scores


def agg_loss(loss_mat, loss_mask, loss_agg_mode):
    return verl_F.masked_mean(loss_mat, loss_mask)


def register_policy_loss(name):
    return lambda function: function


@register_policy_loss("likelihood")
def compute_likelihood(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    loss = agg_loss(-config.own_scale * advantages * log_prob, response_mask, loss_agg_mode)
    return loss, {"actor/own_scale": config.own_scale}
"""


@pytest.mark.slow
def test_a_launch_in_a_fork_of_verl_trains_with_the_forks_own_functions(
    overrides: list[str], tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"trainer/ppo/core_algos.py": FORK, "workers/actor/weights.py": "def factor():\n    return 2.0\n"}
    for name, text in files.items():
        (file := tmp_path / "verl" / name).parent.mkdir(parents=True)
        file.write_text(text)
        for folder in list(file.parents)[:3]:
            (folder / "__init__.py").write_text("import a_library_that_is_not_installed\n")
    monkeypatch.chdir(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    ours = [f"+posttrain.{text}" for text in overrides if text.split(".")[0] in ("tracking", "placement", "run")]
    actor = "actor_rollout_ref.actor"
    given = [
        f"actor_rollout_ref.model.path={tiny_llama}",
        f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/train.jsonl",
        "data.train_batch_size=2", "data.max_prompt_length=32", "data.max_response_length=8",
        "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=native",
        f"{actor}.ppo_mini_batch_size=2", f"{actor}.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4", f"{actor}.optim.lr=1e-3",
        f"custom_reward_function.path={tmp_path}/reward.py", "custom_reward_function.name=score",
        "trainer.n_gpus_per_node=1", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "algorithm.adv_estimator=doubled", "algorithm.times=1.5",
        f"{actor}.policy_loss.loss_mode=likelihood", f"+{actor}.own_scale=0.5",
    ]  # fmt: skip
    loaded = check_request(read_config(None, [*given, *ours], "verl", here=True), look_at_files=True).loaded
    assert loaded.problems == () and loaded.unsupported == ()
    folder = train_run(loaded.config)
    lines = steps(folder)
    assert len(lines) == 2 and lines[0]["policy/own_scale"] == 0.5
    for line in (folder / "samples/step_1.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["advantage"] == pytest.approx(3 * sample["reward"], abs=1e-5)


TOKENS = """
def compute_padding_advantage(token_level_rewards, responses, response_mask, index):
    assert (responses[response_mask == 0] == 7).all() and (response_mask == 0).any(), responses
    return response_mask * 1.0, response_mask * 1.0
"""


def test_tokens_behind_a_response_are_the_pad_token(tmp_path: Path) -> None:
    """As verl pads them, which estimators that count tokens leave out by it."""
    import torch

    from posttrain.records.batches import ScoredBatch, SequenceBatch, ShapedBatch, TrainerLogprobs
    from posttrain.records.plans import AdvantagePlan
    from posttrain.steps.advantage import estimate_advantages

    (tmp_path / "own.py").write_text(TOKENS)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    batch = SequenceBatch(
        tokens=torch.tensor([[1, 3, 4, 5], [1, 6, 0, 0]]), prompt_lengths=torch.tensor([1, 1]), response_mask=mask,
        rollout_logprobs=torch.zeros(2, 3), group_index=torch.tensor([0, 0]), trajectory_index=torch.tensor([0, 1]),
        sample_ids=("a", "b"),
    )  # fmt: skip
    valid = torch.tensor([True, True])
    scored = ScoredBatch(sequences=batch, rewards=torch.ones(2), valid=valid, trained=valid)
    shaped = ShapedBatch(scored=scored, logprobs=TrainerLogprobs(), rewards=torch.ones(2))
    plan = AdvantagePlan(name="padding", path=str(tmp_path / "own.py"), pad_token=7)
    assert torch.equal(estimate_advantages(shaped, None, plan).advantages, mask.float())


SKYRL = """
import torch
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.ppo_utils import PolicyLossRegistry

def compute_reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None):
    return (-log_probs * advantages).mean(), {"own_factor": config.own_factor}

PolicyLossRegistry.register("likelihood", compute_reinforce)
"""


@pytest.mark.slow
def test_a_launch_of_skyrl_trains_with_the_loss_that_its_program_registers(
    overrides: list[str], tmp_path: Path, tiny_llama: Path
) -> None:
    """Responses that are longer are better, and they get longer."""
    (tmp_path / "main_mine.py").write_text(SKYRL)
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums", "reward_model": {"ground_truth": "0"}} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def score(response, ground_truth):\n    return response.count('e') / 4\n")
    ours = [text for text in overrides if text.split(".")[0] in ("tracking", "placement", "run")]
    given = [
        f"data.train_data=[{tmp_path}/train.jsonl]", "data.val_data=null", "environment.env_class=gsm8k",
        f"trainer.policy.model.path={tiny_llama}", "trainer.placement.policy_num_gpus_per_node=1",
        "trainer.algorithm.policy_loss_type=likelihood", "+trainer.algorithm.own_factor=0.5",
        "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "generator.n_samples_per_prompt=8",
        "trainer.micro_train_batch_size_per_gpu=64", "trainer.micro_forward_batch_size_per_gpu=64",
        "trainer.algorithm.use_kl_loss=false", "trainer.policy.optimizer_config.lr=1e-2", "trainer.eval_interval=-1",
        "trainer.eval_before_train=false", "generator.sampling_params.max_generate_length=8", "trainer.ckpt_interval=-1",
        f"'+posttrain.reward.terms=[{{name: score, path: {tmp_path}/reward.py}}]'",
        *(f"'+posttrain.{text}'" for text in ours if "total_steps" not in text), "+posttrain.run.total_steps=12",
        "+posttrain.model.compute_dtype=float32",
    ]  # fmt: skip
    (tmp_path / "run.sh").write_text("python main_mine.py " + " \\\n  ".join(given) + "\n")
    loaded = check_request(load_request([str(tmp_path / "run.sh")], None, here=True), look_at_files=True).loaded
    lines = steps(train_run(loaded.config))
    assert lines[0]["policy/own_factor"] == 0.5 and len(lines) == 12
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"] + 0.1
