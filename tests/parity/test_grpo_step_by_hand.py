"""One GRPO step of the real stages and the real engine equals a calculation written out here.

The calculation uses nothing of the project: the unmodified Hugging Face model, one sequence at a time, no padding and no
packing, in float64; advantages, loss, KL, gradient norm and AdamW from their formulas. The engine computes in float32, so
numbers agree to float32's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from batches import compared
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.records.plans import AdvantagePlan, LossPlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import UpdateStats
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.assemble import assemble
from posttrain.steps.update import update

TEMPERATURE = 0.8
CLIP_LOW, CLIP_HIGH = 0.2, 0.3
KL_COEF = 0.05
ENTROPY_COEF = 0.01
LR, BETAS, WEIGHT_DECAY, MAX_NORM = 3e-3, (0.9, 0.98), 0.1, 0.5
EPS = 1e-4  # large, so that AdamW's g / (|g| + eps) does not blow rounding errors of tiny gradients up to whole steps

# Rewards of three groups of four; None is a response whose reward function failed.
REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.5, None], [1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 1.0, 0.3]]
PROMPT_LENGTHS = [5, 1, 12]
RESPONSE_LENGTHS = [[3, 7, 1, 4], [2, 2, 9, 5], [6, 1, 8, 3]]


@dataclass
class Sequence:
    """A prompt and a response, with what the plain calculation knows about it."""

    tokens: list[int]
    prompt_length: int
    advantage: float
    valid: bool

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass
class Expected:
    losses: list[float]  # per update
    grad_norms: list[float]
    weights: dict[str, Tensor]
    kl: float  # over all loss tokens of the step, as the metrics are
    entropy: float
    clip_fraction: float


@pytest.fixture(scope="module")
def reference_folder(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's model, a little way off, so that the KL is neither 0 nor beyond the clamp of k3."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
    folder = tmp_path_factory.mktemp("reference")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scored() -> list[ScoredGroup]:
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 259, (length,), generator=generator).tolist())

    groups = []
    for number, (rewards, prompt_length, lengths) in enumerate(
        zip(REWARDS, PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)
    ):
        prompt = Prompt(prompt_id=f"train.jsonl:{number}", token_ids=ids(prompt_length), text="", data_source="sums")
        trajectories = tuple(
            Trajectory(
                sample_id=f"{prompt.prompt_id}/{sample}",
                token_ids=ids(length),
                logprobs=(-1.0,) * length,
                text="",
                stop_reason=StopReason.LENGTH,
                policy_version=0,
            )
            for sample, length in enumerate(lengths)
        )
        outcomes = tuple(Invalid("exception") if reward is None else Reward(reward) for reward in rewards)
        groups.append(ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=outcomes))
    return groups


# ------------------------------------------------------------------------------------------ the plain calculation


def plain_sequences(groups: list[ScoredGroup]) -> list[Sequence]:
    """A = (r - mean) / (std + 1e-6) with the sample standard deviation, over the valid rewards of a group."""
    sequences = []
    for group, rewards in zip(groups, REWARDS, strict=True):
        known = [reward for reward in rewards if reward is not None]
        mean = sum(known) / len(known)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in known) / (len(known) - 1))
        prompt = group.group.prompt.token_ids
        for trajectory, reward in zip(group.group.trajectories, rewards, strict=True):
            advantage = 0.0 if reward is None else (reward - mean) / (std + 1e-6)
            sequences.append(
                Sequence([*prompt, *trajectory.token_ids], len(prompt), advantage, valid=reward is not None)
            )
    return sequences


def plain_scores(model: PreTrainedModel, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token [T], from a forward pass over this sequence alone."""
    tokens = torch.tensor(sequence.tokens)
    logits = model(input_ids=tokens[None]).logits[0] / TEMPERATURE
    log_p = logits.log_softmax(-1)[sequence.prompt_length - 1 : -1]  # the token before predicts
    logprobs = log_p[torch.arange(sequence.response_length), tokens[sequence.prompt_length :]]
    return logprobs, -(log_p.exp() * log_p).sum(-1)


def plain_step(
    policy_folder: Path,
    reference_folder: Path,
    sequences: list[Sequence],
    *,
    epochs: int,
    mini_batch: int,
    kl_coef: float,
    entropy_coef: float,
    rate: Callable[[int], float],
) -> Expected:
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64, attn_implementation="eager")
    reference = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        old = [plain_scores(model, sequence)[0] for sequence in sequences]
        ref = [plain_scores(reference, sequence)[0] for sequence in sequences]
    first = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    second = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    losses: list[float] = []
    norms: list[float] = []
    kl_sum = entropy_sum = clipped_sum = all_tokens = 0.0
    for _ in range(epochs):
        for start in range(0, len(sequences), mini_batch):
            rows = [row for row in range(start, start + mini_batch) if sequences[row].valid]
            count = sum(sequences[row].response_length for row in rows)  # loss tokens of the mini-batch
            loss = torch.zeros((), dtype=torch.float64)
            for row in rows:
                logprobs, entropies = plain_scores(model, sequences[row])
                for t in range(sequences[row].response_length):
                    advantage = sequences[row].advantage
                    ratio = (logprobs[t] - old[row][t]).exp()
                    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                    token_loss = torch.maximum(-advantage * ratio, -advantage * clipped)
                    d = ref[row][t] - logprobs[t]
                    kl = d.exp() - 1 - d
                    assert kl < 10, "k3 is clamped from 10 on; this test is about values below"
                    loss = loss + (token_loss + kl_coef * kl - entropy_coef * entropies[t]) / count
                    kl_sum += kl.item()
                    entropy_sum += entropies[t].item()
                    clipped_sum += float(-advantage * clipped > -advantage * ratio)
            all_tokens += count
            model.zero_grad()
            loss.backward()
            norm = math.sqrt(sum(float(weight.grad.square().sum()) for weight in model.parameters()))
            update_number = len(losses)
            losses.append(loss.item())
            norms.append(norm)
            with torch.no_grad():  # AdamW (arXiv:1711.05101, algorithm 2), decoupled decay first
                lr = LR * rate(update_number)
                for name, weight in model.named_parameters():
                    gradient = weight.grad * min(1.0, MAX_NORM / (norm + 1e-6))
                    weight.mul_(1 - lr * WEIGHT_DECAY)
                    first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
                    second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient**2
                    mean = first[name] / (1 - BETAS[0] ** (update_number + 1))
                    variance = second[name] / (1 - BETAS[1] ** (update_number + 1))
                    weight.sub_(lr * mean / (variance.sqrt() + EPS))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return Expected(losses, norms, weights, kl_sum / all_tokens, entropy_sum / all_tokens, clipped_sum / all_tokens)


# ------------------------------------------------------------------------------------------------- the real thing


def engine_step(
    policy_folder: Path,
    reference_folder: Path,
    groups: list[ScoredGroup],
    *,
    epochs: int,
    mini_batch: int,
    kl_coef: float,
    entropy_coef: float,
    rate: Callable[[int], float],
    micro_batch: int,
) -> tuple[UpdateStats, dict[str, Tensor]]:
    model = load_causal_lm(str(policy_folder), dtype=torch.float32)
    engine = LocalTrainEngine(
        model,
        AutoTokenizer.from_pretrained(policy_folder),
        optimizer=OptimizerConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM),
        learning_rate_factor=rate,
        sequences_per_micro_batch=micro_batch,
        sequences_per_scoring_batch=5,
    )
    reference = LogprobScorer(load_causal_lm(str(reference_folder), dtype=torch.float32), 4) if kl_coef else None
    loss = LossPlan(
        name="ppo_clip",
        parameters={"clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH, "dual_clip": None},
        aggregation="token_mean",
        temperature=TEMPERATURE,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
    )
    on_policy = epochs * (12 // mini_batch) == 1
    plan = UpdatePlan(loss=loss, epochs=epochs, sequences_per_update=mini_batch, on_policy=on_policy)
    shaped = compared(assemble(groups), engine, reference, plan)
    train = estimate_advantages(shaped, None, AdvantagePlan(name="grpo"))
    stats = update(engine, train, plan)
    return stats, {name: weight.detach() for name, weight in model.named_parameters()}


def largest_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all weights; weights are of size 0.1 to 1."""
    assert weights.keys() == expected.keys()
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


def start_weights(folder: Path) -> dict[str, Tensor]:
    return {name: w.detach().double() for name, w in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}


@pytest.mark.parametrize("micro_batch", [1, 5, 12])
@pytest.mark.parametrize("kl_coef", [0.0, KL_COEF])
def test_one_update_equals_the_plain_calculation(
    tiny_qwen: Path, reference_folder: Path, scored: list[ScoredGroup], micro_batch: int, kl_coef: float
) -> None:
    """On-policy: all twelve sequences in one update, the ratio is 1."""
    options = {
        "epochs": 1,
        "mini_batch": 12,
        "kl_coef": kl_coef,
        "entropy_coef": 0.0,
        "rate": lambda update_number: 1.0,
    }
    expected = plain_step(tiny_qwen, reference_folder, plain_sequences(scored), **options)
    stats, weights = engine_step(tiny_qwen, reference_folder, scored, **options, micro_batch=micro_batch)

    assert stats.updates == 1
    assert stats.metrics["policy/loss"] == pytest.approx(expected.losses[0], rel=1e-5, abs=1e-6)
    assert stats.metrics["policy/grad_norm"] == pytest.approx(expected.grad_norms[0], rel=1e-5)
    assert expected.grad_norms[0] > MAX_NORM  # so clipping is part of what agrees
    assert largest_difference(weights, expected.weights) < 5e-7
    # The update stands well above that: weights moved by about lr.
    assert largest_difference(weights, start_weights(tiny_qwen)) > LR / 2
    if kl_coef:
        assert stats.metrics["reference/kl"] == pytest.approx(expected.kl, rel=1e-5)
    assert stats.metrics["policy/ratio_mean"] == 1.0


@pytest.mark.parametrize("micro_batch", [2, 6])
def test_four_updates_with_old_logprobs_equal_the_plain_calculation(
    tiny_qwen: Path, reference_folder: Path, scored: list[ScoredGroup], micro_batch: int
) -> None:
    """Two epochs over two mini-batches: ratios leave 1, some are clipped; AdamW's averages and the schedule matter. The
    mini-batches have different counts of loss tokens (15 + 4 and 14 + 18) and the first one holds the invalid response."""
    options = {
        "epochs": 2,
        "mini_batch": 6,
        "kl_coef": KL_COEF,
        "entropy_coef": ENTROPY_COEF,
        "rate": lambda update_number: (update_number + 1) / 4,
    }
    expected = plain_step(tiny_qwen, reference_folder, plain_sequences(scored), **options)
    stats, weights = engine_step(tiny_qwen, reference_folder, scored, **options, micro_batch=micro_batch)

    assert stats.updates == 4
    assert 0.02 < expected.clip_fraction < 0.9  # the clipped branch is part of what agrees
    assert stats.metrics["policy/clip_fraction"] == pytest.approx(expected.clip_fraction)
    assert stats.metrics["policy/loss"] == pytest.approx(sum(expected.losses) / 4, rel=1e-5, abs=1e-6)
    assert stats.metrics["policy/grad_norm"] == pytest.approx(sum(expected.grad_norms) / 4, rel=1e-5)
    assert stats.metrics["policy/lr"] == pytest.approx(LR * (1 + 2 + 3 + 4) / 4 / 4)
    assert stats.metrics["reference/kl"] == pytest.approx(expected.kl, rel=1e-5)
    assert stats.metrics["policy/entropy"] == pytest.approx(expected.entropy, rel=1e-5)
    assert largest_difference(weights, expected.weights) < 1e-6


def test_invalid_response_has_no_part_in_the_step(tiny_qwen: Path, scored: list[ScoredGroup]) -> None:
    """Whatever stands in the invalid response, the updated weights are the same bits."""
    first = scored[0].group
    changed_ids = tuple(reversed(first.trajectories[3].token_ids))
    assert changed_ids != first.trajectories[3].token_ids
    other = Trajectory(
        sample_id=first.trajectories[3].sample_id,
        token_ids=changed_ids,
        logprobs=first.trajectories[3].logprobs,
        text="",
        stop_reason=StopReason.LENGTH,
        policy_version=0,
    )
    changed_group = TrajectoryGroup(prompt=first.prompt, trajectories=(*first.trajectories[:3], other))
    changed = [ScoredGroup(group=changed_group, outcomes=scored[0].outcomes), *scored[1:]]
    results = [
        engine_step(
            tiny_qwen,
            tiny_qwen,
            groups,
            epochs=1,
            mini_batch=12,
            kl_coef=0.0,
            entropy_coef=0.0,
            rate=lambda update_number: 1.0,
            micro_batch=1,
        )
        for groups in (scored, changed)
    ]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])
