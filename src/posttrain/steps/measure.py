"""Metrics of a step, from what the stages handed on. docs/metrics.md says what each one means."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import pstdev

import torch
from torch import Tensor

from posttrain.algos.statistics import masked_mean, value_fit
from posttrain.asynchrony.pending import Entry
from posttrain.interfaces.row_work import RowWork, in_this_process
from posttrain.records.batches import TrainBatch, TrainerLogprobs
from posttrain.records.computed_tensors import of_each_row
from posttrain.records.prompts import Prompt
from posttrain.records.span_tensors import SpanTensor, row_counts
from posttrain.records.statistics import UpdateStats
from posttrain.records.stored_rows import equal_keys
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup, StopReason, Trajectory
from posttrain.steps.row_numbers import RowNumbers, gaps_of_rows, numbers_of_rows, sums_and_ends, sums_of_weights


def measure(
    groups: Sequence[ScoredGroup], batch: TrainBatch, update: UpdateStats, found: RowNumbers | None = None
) -> dict[str, float]:
    """All metrics of a step but its times. Args: found, see ``learning_metrics``."""
    return {
        **reward_metrics(groups),
        **length_metrics(groups),
        **episode_metrics(groups),
        **learning_metrics(batch, update, found),
    }


def learning_metrics(batch: TrainBatch, update: UpdateStats, found: RowNumbers | None = None) -> dict[str, float]:
    """Metrics of advantages, critic, sampler gap, correction and updates. Args: found, numbers of the batch's rows where they
    are known."""
    known = found or numbers_of_rows(batch, update)
    return {
        **advantage_metrics(batch, known.advantages),
        **divergence_metrics(batch),
        **critic_metrics(batch, known.critic),
        **gap_metrics_of(known.gaps),
        **correction_metrics(batch.sequences.response_mask, batch.logprobs, known.correction),
        **update.metrics,
    }


def divergence_metrics(batch: TrainBatch) -> dict[str, float]:
    """The divergence from teachers that advantages have less; the loss reports its own."""
    if batch.divergence is None or not batch.loss_mask.any():
        return {}
    return {"distillation/divergence": float(masked_mean(batch.divergence, batch.loss_mask))}


def reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    rewards = [outcome for outcome in outcomes if isinstance(outcome, Reward)]
    reasons = Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Invalid))
    metrics = {"reward/invalid_share": sum(reasons.values()) / len(outcomes)}
    metrics |= {f"reward/invalid/{reason}": count / len(outcomes) for reason, count in reasons.items()}
    if rewards:
        values = torch.tensor([reward.value for reward in rewards], dtype=torch.float64)
        metrics |= {
            "reward/mean": values.mean().item(),
            "reward/std": values.std(correction=0).item(),
            "reward/min": values.min().item(),
            "reward/max": values.max().item(),
        }
    terms: dict[str, list[float]] = defaultdict(list)
    for reward in rewards:
        for name, value in reward.terms:
            terms[name].append(value)
    metrics |= {f"reward/term/{name}": sum(values) / len(values) for name, values in terms.items()}
    flat = sum(1 for group in groups if len({o.value for o in group.outcomes if isinstance(o, Reward)}) <= 1)
    metrics["group/no_signal_share"] = flat / len(groups)
    return metrics


def staleness_metrics(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Updates that the policy, at ``version`` when it began to learn from these samples, was ahead of their oldest tokens."""
    ages = [version - each.oldest_version for group in groups for each in group.group.trajectories]
    return {"rollout/staleness_mean": sum(ages) / len(ages), "rollout/staleness_max": float(max(ages))}


def asynchrony_metrics(
    groups: Sequence[ScoredGroup],
    train: TrainBatch,
    update: UpdateStats,
    *,
    consumed: Sequence[Entry],
    steps: int,
    version: int,
    over_rows: RowWork = in_this_process,
) -> dict[str, float]:
    """Staleness of the groups that a step trained, and the distance between the policies that sampled and the one that learned.

    Args: consumed, the same groups in the ledger; steps that were trained before; version of the weights at the step's start.
    """
    ages = Counter(steps - entry.started for entry in consumed)
    tokens: Counter[int] = Counter()
    for group in groups:
        for trajectory in group.group.trajectories:
            for sample in trajectory.samples:
                ends = [*(span.first_token for span in sample.spans[1:]), len(sample.token_ids)]
                for span, end in zip(sample.spans, ends, strict=True):
                    # Responses that were kept from another run may be of its later weights
                    tokens[max(version - span.version, 0)] += sample.sampled_between(span.first_token, end)
    count = max(sum(ages.values()), 1)
    return {
        "async/staleness_steps_mean": sum(age * each for age, each in ages.items()) / count,
        "async/staleness_steps_max": float(max(ages, default=0)),
        **{f"async/staleness_share/{age}": each / count for age, each in sorted(ages.items())},
        **{f"async/token_share/{age}": each / max(tokens.total(), 1) for age, each in sorted(tokens.items())},
        **off_policy_metrics(
            train.sequences.rollout_logprobs, update.trainer_logprobs, train.sequences.response_mask, over_rows
        ),
    }


def off_policy_metrics(
    rollout_logprobs: Tensor, trainer_logprobs: Tensor | None, mask: Tensor, over_rows: RowWork = in_this_process
) -> dict[str, float]:
    """Effective sample size and chi-squared divergence of the tokens, by w = pi_trainer / pi_sampler.

    Share of effective tokens: (sum w)^2 / (n x sum w^2), 1 where both policies agree. chi2: mean of w^2, less 1.

    Args: rollout_logprobs [B, T] nats; trainer_logprobs [n, T] nats, of the first n rows, None when the trainer computed
        none; mask [B, T] bool.
    """
    if trainer_logprobs is None:
        return {}
    rows = slice(len(trainer_logprobs))
    found = over_rows(weights_of_rows, rollout_logprobs[rows], trainer_logprobs, mask[rows])
    tokens, weights, squares = found.sum(dim=0).tolist()
    if not tokens:
        return {}
    return {
        "async/effective_token_share": weights * weights / (tokens * squares),
        "async/chi2": squares / tokens - 1.0,
    }


def weights_of_rows(rollout_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Count the tokens of each row, and add up their w (see ``off_policy_metrics``) and w^2, [B, 3] float64."""
    log_weights = torch.where(mask, trainer_logprobs - rollout_logprobs, 0.0).double().clamp(-20.0, 20.0)
    weights = torch.where(mask, log_weights.exp(), 0.0)
    return torch.stack([mask.sum(dim=1).double(), weights.sum(dim=1), weights.square().sum(dim=1)], dim=1)


def length_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.group.trajectories]
    lengths = [trajectory.sampled_tokens for trajectory in trajectories]
    texts = Counter(equal_keys([trajectory.token_ids for trajectory in trajectories]))
    prompts = [len(group.group.first_prompt) for group in groups]
    cut = sum(trajectory.stop_reason is StopReason.LENGTH for trajectory in trajectories)
    # By id, because a filter may copy groups.
    read = {
        group.group.prompt.prompt_id: (tuple(group.group.first_prompt), _images(group.group.prompt)) for group in groups
    }
    # Episodes may all begin alike
    in_worlds = any(trajectory.turn_texts for trajectory in trajectories)
    return {
        **({} if in_worlds else {"prompt/distinct_share": len(set(read.values())) / len(read)}),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/length_min": float(min(lengths)),
        "response/length_std": pstdev(lengths),
        "response/truncated_share": cut / len(lengths),
        "response/most_common_share": max(texts.values()) / len(lengths),
        "prompt/length_mean": sum(prompts) / len(prompts),
        "prompt/length_max": float(max(prompts)),
        "prompt/length_min": float(min(prompts)),
        "step/prompts": float(len(groups)),
        "step/sequences": float(len(lengths)),
        "step/response_tokens": float(sum(lengths)),
    }


def _images(prompt: Prompt) -> str:
    return prompt.images.content_hash if prompt.images else ""


def episode_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Turns, ends and own metrics of episodes in environments; empty where no response has turns."""
    episodes = [each for group in groups for each in group.group.trajectories if each.turn_texts]
    if not episodes:
        return {}
    turns = [episode.turn_count for episode in episodes]
    read = [sum(len(sample.token_ids) for sample in episode.samples) - episode.sampled_tokens for episode in episodes]
    ends = Counter(episode.env_stop for episode in episodes if episode.env_stop)
    return {
        "episode/turns_mean": sum(turns) / len(turns),
        "episode/turns_max": float(max(turns)),
        "episode/observation_tokens_mean": sum(read) / len(read),
        "episode/samples_mean": sum(len(episode.samples) for episode in episodes) / len(episodes),
        "episode/close_failed": float(sum(bool(episode.close_failure) for episode in episodes)),
        **{f"episode/stop/{word}": count / len(episodes) for word, count in sorted(ends.items())},
        **{f"environment/{name}": value for name, value in environment_means(episodes).items()},
    }


def environment_means(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """The environments' own metrics: of each the mean over the episodes that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.env_metrics:
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


def advantage_metrics(batch: TrainBatch, sums: Tensor | None = None) -> dict[str, float]:
    """Metrics of the advantages of loss tokens; empty where there is none. Args: sums, ``sums_and_ends`` of them where known."""
    tokens = row_counts(batch.loss_mask)
    rows = tokens > 0
    if not rows.any():
        return {}
    found = (_sums_of_rows(batch.advantages, batch.loss_mask, tokens) if sums is None else sums)[rows]
    total, absolute = found[:, :2].sum(dim=0).tolist()
    return {
        "advantage/mean": total / int(tokens.sum()),
        "advantage/abs_mean": absolute / int(tokens.sum()),
        "advantage/max": found[:, 2].max().item(),
        "advantage/min": found[:, 3].min().item(),
    }


def _sums_of_rows(values: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """Add up the values that the mask selects in each row, and their sizes; find the largest and the smallest, [B, 4] float64.

    Of one number per row, a sum is this number times the tokens: float64 has the sum of so many equal float32 numbers exactly, so
    both ways give the same bits.
    """
    if isinstance(values, SpanTensor) and isinstance(mask, SpanTensor):
        each = torch.from_numpy(values.of_rows).double()
        return torch.stack([each * tokens, each.abs() * tokens, each, each], dim=1)
    return of_each_row(sums_and_ends, values, mask)


def critic_metrics(batch: TrainBatch, found: Tensor | None = None) -> dict[str, float]:
    """The critic's values before this step's update, beside the returns; empty without a critic. Args: found, see
    ``value_fit``."""
    mask = batch.loss_mask
    if batch.critic is None or not row_counts(mask).any():
        return {}
    fit = value_fit(batch.critic.values, batch.critic.returns, mask, found)
    metrics = {"critic/values_mean": fit.values_mean, "critic/returns_mean": fit.returns_mean}
    explained = fit.explained_variance
    return metrics if explained is None else metrics | {"critic/explained_variance": explained}


def gap_metrics(
    rollout_logprobs: Tensor, trainer_logprobs: Tensor | None, mask: Tensor, over_rows: RowWork = in_this_process
) -> dict[str, float]:
    """Distance of the sampler's log-probs from the trainer's, for the same tokens and weights.

    Args: rollout_logprobs [B, T] nats; trainer_logprobs [n, T] nats, of the first n rows, None when the trainer computed
        none; mask [B, T] bool.
    """
    if trainer_logprobs is None:
        return {}
    rows = slice(len(trainer_logprobs))
    return gap_metrics_of(over_rows(gaps_of_rows, rollout_logprobs[rows], trainer_logprobs, mask[rows]))


def gap_metrics_of(found: Tensor | None) -> dict[str, float]:
    """The same from ``gaps_of_rows``; None: the trainer computed no log-probs."""
    if found is None:
        return {}
    tokens, gaps, above = found[:, :3].sum(dim=0).tolist()
    if not tokens:  # every episode has failed before its first token
        return {}
    return {"gap/mean": gaps / tokens, "gap/max": found[:, 3].max().item(), "gap/share_above": above / tokens}


def correction_metrics(mask: Tensor, correction: TrainerLogprobs, sums: Tensor | None = None) -> dict[str, float]:
    """The effect of rollout correction on the step; empty without one.

    Args: mask [B, T] bool, sampled tokens; sums, ``sums_of_weights`` where they are known.
    """
    metrics: dict[str, float] = {}
    weights = correction.importance_weights
    if weights is not None and row_counts(mask).any():
        found = of_each_row(sums_of_weights, weights, mask) if sums is None else sums
        tokens, total, squares = found[:, :3].sum(dim=0).tolist()
        metrics |= {"correction/weight_mean": total / tokens, "correction/weight_max": found[:, 3].max().item()}
        if squares:
            metrics["correction/effective_token_share"] = total * total / squares / tokens
    if correction.rejected is not None and mask.any():
        sampled = mask.any(dim=1)
        gone = sampled & ~correction.kept(mask).any(dim=1)
        metrics["correction/rejected_token_share"] = int(correction.rejected.sum()) / int(mask.sum())
        metrics["correction/rejected_response_share"] = int(gone.sum()) / int(sampled.sum())
    return metrics
