"""A grader that crashes on a tenth of the responses leaves the gradient of the other nine tenths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from batches import shaped_batch
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.config.reward import RewardConfig
from posttrain.models.loading import load_causal_lm
from posttrain.records.plans import AdvantagePlan, LossPlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, ScoredGroup, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.scorer import ScorerInWorkers
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.assemble import assemble
from posttrain.steps.score import score

GRADER = """
import os, signal, zlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    chance = zlib.crc32(solution_str.encode()) % 30
    if chance == 0:
        os._exit(1)
    if chance == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if chance == 2:
        raise RuntimeError(solution_str)
    return len(solution_str) % 4
"""


def make_groups() -> list[TrajectoryGroup]:
    """6 prompts with 16 responses of 1 to 9 tokens each."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (count,), generator=generator).tolist())

    return [
        TrajectoryGroup(
            prompt=Prompt(prompt_id=name, token_ids=draw(number + 2), text=name, data_source="t"),
            trajectories=tuple(
                Trajectory(
                    sample_id=f"{name}/{sample}",
                    token_ids=(ids := draw(1 + (5 * sample + number) % 9)),
                    logprobs=(0.0,) * len(ids),
                    text=" ".join(map(str, ids)),
                    stop_reason=StopReason.EOS,
                    policy_version=0,
                )
                for sample in range(16)
            ),
        )
        for number, name in enumerate("abcdef")
    ]


def gradient(folder: Path, groups: list[ScoredGroup]) -> dict[str, Tensor]:
    engine = LocalTrainEngine(
        load_causal_lm(str(folder), dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(),
        learning_rate_factor=lambda update_number: 1.0,
        sequences_per_micro_batch=8,
        sequences_per_scoring_batch=8,
    )
    batch = estimate_advantages(shaped_batch(assemble(groups)), None, AdvantagePlan(name="grpo"))
    loss = LossPlan(
        name="ppo_clip",
        parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        aggregation="token_mean",
        temperature=1.0,
    )
    engine.forward_backward(batch, loss, batch.counts())
    return {name: weight.grad.clone() for name, weight in engine.model.named_parameters() if weight.grad is not None}


def test_gradient_is_that_of_the_run_without_those_samples(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text(GRADER)
    path = str(tmp_path / "grader.py")
    scorer = ScorerInWorkers(RewardConfig(terms=[{"name": "compute_score", "path": path}], workers=2))
    try:
        groups = score(make_groups(), scorer)
        remaining = [
            replace(
                group.group,
                trajectories=tuple(
                    trajectory
                    for trajectory, outcome in zip(group.group.trajectories, group.outcomes, strict=True)
                    if not isinstance(outcome, Invalid)
                ),
            )
            for group in groups
        ]
        without = score(remaining, scorer, max_invalid_share=0.0)
    finally:
        scorer.close()
    reasons = [outcome.reason for group in groups for outcome in group.outcomes if isinstance(outcome, Invalid)]
    assert 5 <= len(reasons) <= 20 and set(reasons) == {"crashed", "exception"}  # of 96
    crashing, clean = gradient(tiny_llama, groups), gradient(tiny_llama, without)
    assert any(weight.abs().max() > 1e-3 for weight in clean.values())
    for name, expected in clean.items():
        torch.testing.assert_close(crashing[name], expected, rtol=1e-5, atol=1e-7, msg=name)
