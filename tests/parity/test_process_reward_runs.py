"""PRIME on a tiny model: a process reward model that is trained during the run, against a plain calculation in float64."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_runs import assert_same
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.plan.checks.train import check
from posttrain.registry import is_installed

REWARD = """
def even(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2 == 0)
"""
EPS = 1e-4  # large, so that AdamW does not blow rounding errors of tiny gradients up to whole steps
SCALE = 0.5
Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "0"}} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = {
        "log_ratio_scale": SCALE,
        "sequences_per_mini_batch": 4,
        "sequences_per_micro_batch": 3,
        "optimizer": {"lr": 1e-3, "eps": EPS, "weight_decay": 0.0, "max_grad_norm": 10.0},
    }
    sections: dict[str, Any] = {
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8, "stop_token_ids": [*range(0, 256, 12)]},
        "policy": {"sequences_per_micro_batch_per_device": 4, "optimizer": {"lr": 1e-3, "eps": EPS}},
        "advantage": {"name": "prime", "process_weight": 3.0, "outcome_weight": 2.0},
        "tracking": {"trackers": [], "batches_every_steps": 1},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }

    def make_config(folder: str, *, update: str = "before", steps: int = 1, **changes: Any) -> RunConfig:
        reward = {
            "workers": 1,
            "terms": [{"name": "even", "path": str(tmp_path / "reward.py")}],
            "process": process | {"update": update},
        }
        run = {"seed": 1, "total_steps": steps, "folder": str(tmp_path / folder)}
        config = RunConfig.model_validate(sections | {"run": run, "reward": reward} | changes)
        assert check(config) == []
        return config

    return make_config


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 0]


class Plain:
    """The rows of a step and the unmodified model in float64."""

    def __init__(self, folder: Path, batch: dict[str, Tensor]):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        width = batch["sampled.tokens"].shape[1] - batch["sampled.response_mask"].shape[1]
        prompts, lengths = batch["sampled.prompt_lengths"].tolist(), batch["sampled.response_mask"].sum(1).tolist()
        self.rows = [
            (row[width - prompt : width], row[width : width + length])
            for row, prompt, length in zip(batch["sampled.tokens"].tolist(), prompts, lengths, strict=True)
        ]
        self.groups = batch["sampled.group_index"].tolist()
        self.scores = batch["sampled.rewards"].double()

    def logprobs(self, number: int) -> Tensor:
        prompt, response = self.rows[number]
        logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]

    def learn(self) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """Binary cross-entropy of sigmoid(scale x log-ratio), four rows an update. Returns: the reference's log-probs, those of
        the passes in which the model learned, and the losses."""
        with torch.no_grad():
            reference = [self.logprobs(number) for number in range(len(self.rows))]
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=EPS, weight_decay=0.0)
        seen, losses = [], []
        for start in range(0, len(self.rows), 4):
            part = range(start, start + 4)
            found = [self.logprobs(number) for number in part]
            logits = torch.stack([SCALE * (found[at] - reference[n]).sum() for at, n in enumerate(part)])
            loss = torch.nn.functional.binary_cross_entropy(logits.sigmoid(), self.scores[list(part)])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
            optimizer.step()
            seen += [each.detach() for each in found]
            losses.append(loss.item())
        return reference, seen, losses

    def rewards(self, logprobs: list[Tensor], reference: list[Tensor]) -> list[Tensor]:
        """Scaled log-ratios without the last token's, divided by the largest sum to the end."""
        found = [SCALE * (new - old) for new, old in zip(logprobs, reference, strict=True)]
        for each in found:
            each[-1] = 0
        largest = max(float(each[at:].sum().abs()) for each in found for at in range(len(each)))
        return [each / (largest + 1e-6) for each in found]

    def advantages(self, rewards: list[Tensor]) -> list[Tensor]:
        returns = []
        for number, mine in enumerate(rewards):
            group = [other for other in range(len(rewards)) if self.groups[other] == self.groups[number]]
            n = len(group)
            of_tokens = 3.0 * (mine * n / (n - 1) - sum(float(rewards[g].mean()) for g in group) / (n - 1))
            outcome = self.scores[number] - sum(float(self.scores[g]) for g in group if g != number) / (n - 1)
            of_tokens[-1] += 2.0 * outcome
            returns.append(torch.stack([of_tokens[at:].sum() for at in range(len(of_tokens))]))
        every = torch.cat(returns)
        return [(each - every.mean()) / (every.var() + 1e-8).sqrt() for each in returns]


@pytest.mark.parametrize("update", ["before", "after"])
def test_a_step_of_prime_is_that_of_a_plain_calculation(make: Make, tiny_llama: Path, update: str) -> None:
    folder = train_run(make("run", update=update, checkpoint={"at_end": False}))
    batch = load_file(folder / "batches/step_1.safetensors")
    plain = Plain(tiny_llama, batch)
    assert 0 < plain.scores.sum() < len(plain.scores) and len({len(row) for _, row in plain.rows}) > 2
    reference, logprobs, losses = plain.learn()
    [line] = metrics(folder)
    assert line["process_reward/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    if update == "before":
        with torch.no_grad():
            logprobs = [plain.logprobs(number) for number in range(len(plain.rows))]
    rewards = plain.rewards(logprobs, reference)
    for name, mine in (
        ("trained.sequences.process_rewards", rewards),
        ("trained.advantages", plain.advantages(rewards)),
    ):
        for found, expected in zip(batch[name], mine, strict=True):
            assert found[: len(expected)].tolist() == pytest.approx(expected.tolist(), abs=2e-3), name
            assert not found[len(expected) :].any()
    summed = torch.stack([(new - old).sum() for new, old in zip(logprobs, reference, strict=True)])
    assert line["process_reward/log_ratio"] == pytest.approx(float(summed.mean()), rel=1e-2, abs=1e-5)
    assert line["policy/grad_norm"] > 0


def test_a_model_that_never_learns_gives_no_rewards_beside_its_own_reference(make: Make) -> None:
    folder = train_run(make("run", update="never", checkpoint={"at_end": False}))
    batch = load_file(folder / "batches/step_1.safetensors")
    assert not batch["trained.sequences.process_rewards"].any()
    [line] = metrics(folder)
    assert line["process_reward/log_ratio"] == 0 and "process_reward/loss" not in line


@pytest.mark.slow
def test_the_model_learns_to_tell_right_from_wrong_and_a_resumed_run_is_the_uninterrupted_one(make: Make) -> None:
    every = {"every_steps": 6, "at_end": False}
    whole = train_run(make("whole", steps=12, checkpoint={"at_end": False}))
    lines = metrics(whole)
    assert sum(line["process_reward/loss"] for line in lines[-3:]) < sum(
        line["process_reward/loss"] for line in lines[:3]
    )
    assert all(line["process_reward/skipped_updates"] == 0 for line in lines)
    train_run(make("half", steps=12, checkpoint=every))
    config = make("half", steps=12, checkpoint=every)
    shutil.rmtree(Path(config.folder) / "checkpoints/global_step_12")
    assert (Path(config.folder) / "checkpoints/global_step_6/process_reward").is_dir()
    resumed = metrics(train_run(config))
    names = [name for name in lines[0] if name.startswith(("process_reward/", "policy/", "reward/"))]
    assert [[line[name] for name in names] for line in resumed] == [[line[name] for name in names] for line in lines]


# Changes of sections of a run on two ranks, by name
SPLIT: dict[str, dict[str, Any]] = {
    "shards": {"engine": "fsdp"},
    "shards of single ranks, of the process reward model alone": {"engine": "fsdp"},
    "ranks that share sequences": {"engine": "fsdp", "sequence_parallel": 2},
    "ranks that share matrices": {"engine": "megatron", "tensor_parallel": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", SPLIT)
def test_two_ranks_train_the_process_reward_model_as_one_process_does(
    make: Make, tmp_path: Path, address: str, way: str
) -> None:
    policy = SPLIT[way]
    if not is_installed(policy["engine"]) and policy["engine"] == "megatron":
        pytest.skip("needs megatron-core")
    every = {"every_steps": 2, "at_end": False}
    alone = train_run(make("alone", steps=2, checkpoint=every))
    options = {"fsdp_size": 1} if "single" in way else {}
    learner = {"sequences_per_micro_batch_per_device": 4, "optimizer": {"lr": 1e-3, "eps": EPS}}
    split = make(
        "split",
        steps=2,
        checkpoint=every,
        policy=learner | policy,
        placement={"device": "cpu", "cpu_threads": 1, "devices": 2, "runtime": "ray", "ray_address": address},
    )
    process = split.reward.process
    assert process is not None
    changed = process.model_copy(update={"engine_options": options, "sequences_per_micro_batch": 2})
    split = split.model_copy(update={"reward": split.reward.model_copy(update={"process": changed})})
    assert check(split) == []
    found = train_run(split)
    assert_same(found, alone, roles=("policy", "process_reward"), weights_to=5e-6)
    mine, theirs = (load_file(each / "batches/step_2.safetensors") for each in (found, alone))
    name = "trained.sequences.process_rewards"
    assert theirs[name].abs().max() > 0.1
    torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-4)
