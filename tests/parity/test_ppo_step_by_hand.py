"""One PPO step of the real stages and the real engines, policy and critic, equals a calculation written out here.

The calculation uses nothing of the project: unmodified Hugging Face models, one sequence at a time, in float64; values,
generalised advantages, returns, both losses, gradient norms and AdamW from their formulas. The engines compute in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, PreTrainedModel

from batches import compared
from posttrain.backends.train.local import LocalTrainEngine, LocalValueEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import draw_weights
from posttrain.models.value_head import load_value_model
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import AdvantagePlan, CriticUpdatePlan, LossPlan, UpdatePlan, ValueLossPlan
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import UpdateStats
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.assemble import assemble
from posttrain.steps.measure import critic_metrics
from posttrain.steps.update import merged, update, update_critic

GAMMA, LAMBDA = 0.95, 0.8
CLIP, VALUE_CLIP = 0.2, 0.02
EPOCHS, MINI_BATCH, CRITIC_EPOCHS, CRITIC_MINI_BATCH = 2, 6, 2, 4
BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.98), 0.1, 0.5
LR, CRITIC_LR = 3e-3, 5e-3
EPS = 1e-4  # large, so that AdamW's g / (|g| + eps) does not blow rounding errors of tiny gradients up to whole steps

# Rewards of three prompts with four responses each; None is a response whose reward function failed.
REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.5, None], [1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 1.0, 0.3]]
PROMPT_LENGTHS = [5, 1, 12]
RESPONSE_LENGTHS = [[3, 7, 1, 4], [2, 2, 9, 5], [6, 1, 8, 3]]


@pytest.fixture(scope="module")
def critic_folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token classification model of another family than the policy, with a head that already says something."""
    folder = tmp_path_factory.mktemp("critic")
    model = AutoModelForTokenClassification.from_pretrained(tiny_llama, num_labels=1)
    draw_weights(model.score, 3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scored() -> list[ScoredGroup]:
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 259, (length,), generator=generator).tolist())

    groups = []
    for number, rewards in enumerate(REWARDS):
        prompt = Prompt(prompt_id=f"p:{number}", token_ids=ids(PROMPT_LENGTHS[number]), text="", data_source="sums")
        trajectories = tuple(
            Trajectory(
                sample_id=f"{prompt.prompt_id}/{sample}",
                token_ids=ids(length),
                logprobs=(-1.0,) * length,
                text="",
                stop_reason=StopReason.LENGTH,
                policy_version=0,
            )
            for sample, length in enumerate(RESPONSE_LENGTHS[number])
        )
        outcomes = tuple(Invalid("exception") if reward is None else Reward(reward) for reward in rewards)
        groups.append(ScoredGroup(group=TrajectoryGroup(prompt=prompt, trajectories=trajectories), outcomes=outcomes))
    return groups


# ------------------------------------------------------------------------------------------ the plain calculation


@dataclass
class Row:
    tokens: Tensor
    prompt: int  # tokens of it
    reward: float | None

    @property
    def length(self) -> int:
        return len(self.tokens) - self.prompt


class AdamW:
    """arXiv:1711.05101, algorithm 2, after clipping the global norm."""

    def __init__(self, model: PreTrainedModel, lr: float):
        self.weights, self.lr, self.number = list(model.parameters()), lr, 0
        self.first = [torch.zeros_like(weight) for weight in self.weights]
        self.second = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self, loss: Tensor) -> float:
        """Returns the norm before clipping."""
        gradients = torch.autograd.grad(loss, self.weights)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        self.number += 1
        for index, weight in enumerate(self.weights):
            gradient = gradients[index] * min(1.0, MAX_NORM / (norm + 1e-6))
            self.first[index] = BETAS[0] * self.first[index] + (1 - BETAS[0]) * gradient
            self.second[index] = BETAS[1] * self.second[index] + (1 - BETAS[1]) * gradient**2
            mean = self.first[index] / (1 - BETAS[0] ** self.number)
            variance = self.second[index] / (1 - BETAS[1] ** self.number)
            weight.mul_(1 - self.lr * WEIGHT_DECAY)
            weight.sub_(self.lr * mean / (variance.sqrt() + EPS))
        return norm


@dataclass
class Expected:
    advantages: list[Tensor]  # per row
    returns: list[Tensor]
    explained_variance: float
    losses: list[float]  # of the policy, per update
    norms: list[float]
    weights: dict[str, Tensor]
    critic_losses: list[float]
    critic_norms: list[float]
    critic_weights: dict[str, Tensor]
    value_clip_fraction: float


def plain_logprobs(model: PreTrainedModel, row: Row) -> Tensor:
    log_p = model(row.tokens[None]).logits[0, row.prompt - 1 : -1].log_softmax(-1)
    return log_p.gather(1, row.tokens[row.prompt :, None])[:, 0]


def plain_values(model: PreTrainedModel, row: Row) -> Tensor:
    """The head's output at the token before each response token."""
    return model(row.tokens[None]).logits[0, row.prompt - 1 : -1, 0]


def plain_step(policy_folder: Path, critic_folder: Path, groups: list[ScoredGroup]) -> Expected:
    rows = [
        Row(torch.tensor([*g.group.prompt.token_ids, *t.token_ids]), len(g.group.prompt.token_ids), reward)
        for g, rewards in zip(groups, REWARDS, strict=True)
        for t, reward in zip(g.group.trajectories, rewards, strict=True)
    ]
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64)
    critic = AutoModelForTokenClassification.from_pretrained(critic_folder, dtype=torch.float64).eval()
    with torch.no_grad():
        old_logprobs = [plain_logprobs(policy, row) for row in rows]
        old_values = [plain_values(critic, row) for row in rows]

    # Textbook recursion (arXiv:1506.02438): delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}.
    advantages, returns = [], []
    for row, values in zip(rows, old_values, strict=True):
        advantage = torch.zeros(row.length, dtype=torch.float64)
        for t in reversed(range(row.length)):
            last = t == row.length - 1
            reward = (row.reward or 0.0) if last else 0.0
            delta = reward + (0.0 if last else GAMMA * values[t + 1]) - values[t]
            advantage[t] = delta + (0.0 if last else GAMMA * LAMBDA * advantage[t + 1])
        advantages.append(advantage)
        returns.append(advantage + values)
    valid = [number for number, row in enumerate(rows) if row.reward is not None]
    every = torch.cat([advantages[number] for number in valid])
    assert len(every) == sum(map(sum, RESPONSE_LENGTHS)) - 4
    deviation = (((every - every.mean()) ** 2).sum() / (len(every) - 1) + 1e-8).sqrt()  # over all tokens, n - 1
    white = [(advantage - every.mean()) / deviation for advantage in advantages]

    optimizer, losses, norms = AdamW(policy, LR), [], []
    for _ in range(EPOCHS):
        for start in range(0, 12, MINI_BATCH):
            chosen = [number for number in range(start, start + MINI_BATCH) if number in valid]
            terms = []
            for number in chosen:
                ratio = (plain_logprobs(policy, rows[number]) - old_logprobs[number]).exp()
                terms.append(torch.maximum(-white[number] * ratio, -white[number] * ratio.clamp(1 - CLIP, 1 + CLIP)))
            loss = torch.cat(terms).mean()
            losses.append(loss.item())
            norms.append(optimizer.step(loss))

    critic_optimizer, critic_losses, critic_norms, clipped, seen = AdamW(critic, CRITIC_LR), [], [], 0, 0
    for _ in range(CRITIC_EPOCHS):
        for start in range(0, 12, CRITIC_MINI_BATCH):
            terms = []
            for number in (number for number in range(start, start + CRITIC_MINI_BATCH) if number in valid):
                new, old, target = plain_values(critic, rows[number]), old_values[number], returns[number]
                free = (new - target) ** 2
                near = (old + (new - old).clamp(-VALUE_CLIP, VALUE_CLIP) - target) ** 2
                clipped += int((near > free).sum())
                seen += len(new)
                terms.append(torch.maximum(free, near) / 2)
            loss = torch.cat(terms).mean()
            critic_losses.append(loss.item())
            critic_norms.append(critic_optimizer.step(loss))
    target, guess = (torch.cat([rows_of[number] for number in valid]) for rows_of in (returns, old_values))
    return Expected(
        advantages=white,
        returns=returns,
        explained_variance=1 - ((target - guess).var() / target.var()).item(),
        losses=losses,
        norms=norms,
        weights={name: weight.detach() for name, weight in policy.named_parameters()},
        critic_losses=critic_losses,
        critic_norms=critic_norms,
        critic_weights={name: weight.detach() for name, weight in critic.named_parameters()},
        value_clip_fraction=clipped / seen,
    )


# ------------------------------------------------------------------------------------------------- the real thing


def real_step(
    policy_folder: Path, critic_folder: Path, groups: list[ScoredGroup], micro_batch: int
) -> tuple[TrainBatch, UpdateStats, dict[str, Tensor], dict[str, Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    optimizer = {"betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_NORM}
    policy = LocalTrainEngine(
        load_causal_lm(str(policy_folder), dtype=torch.float32),
        tokenizer,
        optimizer=OptimizerConfig(lr=LR, **optimizer),
        learning_rate_factor=lambda update_number: 1.0,
        sequences_per_micro_batch=micro_batch,
        sequences_per_scoring_batch=5,
    )
    critic = LocalValueEngine(
        load_value_model(str(critic_folder), dtype=torch.float32),
        tokenizer,
        optimizer=OptimizerConfig(lr=CRITIC_LR, **optimizer),
        learning_rate_factor=lambda update_number: 1.0,
        sequences_per_micro_batch=micro_batch,
    )
    loss = LossPlan(
        name="ppo_clip",
        parameters={"clip_ratio_low": CLIP, "clip_ratio_high": CLIP, "dual_clip": None},
        aggregation="token_mean",
        temperature=1.0,
    )
    plan = UpdatePlan(loss=loss, epochs=EPOCHS, sequences_per_update=MINI_BATCH, on_policy=False)
    critic_plan = CriticUpdatePlan(
        loss=ValueLossPlan(value_clip=VALUE_CLIP, aggregation="token_mean"),
        epochs=CRITIC_EPOCHS,
        sequences_per_update=CRITIC_MINI_BATCH,
    )
    batch = assemble(groups)
    values = critic.values(batch.sequences)
    shaped = compared(batch, policy, None, plan)
    train = estimate_advantages(
        shaped, values, AdvantagePlan(name="gae", parameters={"gamma": GAMMA, "gae_lambda": LAMBDA})
    )
    stats = merged(train, update(policy, train, plan), update_critic(critic, train, critic_plan))
    weights, critic_weights = (
        {name: weight.detach() for name, weight in engine.model.named_parameters()} for engine in (policy, critic)
    )
    return train, stats, weights, critic_weights


def largest_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all weights; weights are of size 0.1 to 1."""
    assert weights.keys() == expected.keys()
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


@pytest.fixture(scope="module")
def expected(tiny_qwen: Path, critic_folder: Path, scored: list[ScoredGroup]) -> Expected:
    return plain_step(tiny_qwen, critic_folder, scored)


@pytest.mark.parametrize("micro_batch", [1, 5, 12])
def test_a_step_of_policy_and_critic_equals_the_plain_calculation(
    tiny_qwen: Path, critic_folder: Path, scored: list[ScoredGroup], expected: Expected, micro_batch: int
) -> None:
    train, stats, weights, critic_weights = real_step(tiny_qwen, critic_folder, scored, micro_batch)

    assert train.critic is not None
    for row, (advantages, returns) in enumerate(zip(expected.advantages, expected.returns, strict=True)):
        if not train.loss_mask[row].any():
            continue  # the response whose reward failed
        torch.testing.assert_close(train.advantages[row, : len(advantages)].double(), advantages, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(train.critic.returns[row, : len(returns)].double(), returns, rtol=1e-4, atol=1e-4)
    assert (stats.updates, stats.skipped_updates) == (4, 0)  # 2 x 12 / 6 of the policy, fewer than 2 x 12 / 4
    for name, values in (
        ("policy/loss", expected.losses),
        ("policy/grad_norm", expected.norms),
        ("critic/loss", expected.critic_losses),
        ("critic/grad_norm", expected.critic_norms),
    ):
        assert stats.metrics[name] == pytest.approx(sum(values) / len(values), rel=1e-4, abs=1e-6), name
    assert stats.metrics["critic/lr"] == CRITIC_LR
    assert 0.05 < expected.value_clip_fraction < 0.95  # both branches are part of what agrees
    assert stats.metrics["critic/value_clip_fraction"] == pytest.approx(expected.value_clip_fraction)
    assert critic_metrics(train)["critic/explained_variance"] == pytest.approx(expected.explained_variance, rel=1e-4)
    assert largest_difference(weights, expected.weights) < 2e-6
    assert largest_difference(critic_weights, expected.critic_weights) < 2e-6
    start = AutoModelForTokenClassification.from_pretrained(critic_folder, dtype=torch.float64).requires_grad_(False)
    assert largest_difference(dict(start.named_parameters()), expected.critic_weights) > CRITIC_LR  # they did move
