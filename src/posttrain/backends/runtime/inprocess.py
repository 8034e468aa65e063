"""One device: every role lives in this process, and sampler and trainer share one set of weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from inspect import signature

import torch
from transformers import PreTrainedTokenizerBase

from posttrain.algos import schedules
from posttrain.backends.reward_model.local import LocalRewardModel
from posttrain.config import RunConfig
from posttrain.config.policy import ScheduleConfig
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardModel
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.train_engine import ValueEngine
from posttrain.models.loading import DTYPES, load_causal_lm
from posttrain.models.reward_model import load_reward_model, load_reward_tokenizer
from posttrain.models.value_head import load_value_model
from posttrain.records.plans import BatchPlan
from posttrain.registry import ROLLOUT_ENGINES, RUNTIMES, TRAIN_ENGINES, VALUE_ENGINES, WEIGHT_SYNCS


@RUNTIMES.register("inprocess")
class InProcess:
    """See interfaces.roles.Runtime."""

    def start(self, config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase) -> Roles:
        device = pick_device(config.placement.device)
        if device.type == "cpu":
            torch.set_num_threads(config.placement.cpu_threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(config.run.seed)
        load = partial(
            load_causal_lm,
            dtype=DTYPES[config.model.compute_dtype],
            device=device,
            trust_remote_code=config.model.trust_remote_code,
        )
        model = load(config.model.path)
        assert batches.total_updates is not None
        engine = TRAIN_ENGINES.get(config.policy.engine)
        reference = None
        if config.loss.kl_coef or config.reward.kl.coef:
            frozen = load(config.reference.path or config.model.path).requires_grad_(False)
            reference = engine.scorer(
                frozen,
                config.reference.sequences_per_micro_batch_per_device,
                config.policy.share_prompts,
                config.reference.max_tokens_per_micro_batch,
            )
        full_kl = config.loss.kl_coef > 0 and config.loss.kl_estimator == "full"
        policy = engine(
            model,
            tokenizer,
            optimizer=config.policy.optimizer,
            learning_rate_factor=learning_rate_factor(config.policy.schedule, batches.total_updates),
            sequences_per_micro_batch=batches.sequences_per_micro_batch_per_device,
            sequences_per_scoring_batch=config.reference.sequences_per_micro_batch_per_device,
            max_tokens_per_micro_batch=batches.max_tokens_per_micro_batch,
            max_tokens_per_scoring_batch=config.reference.max_tokens_per_micro_batch,
            reference=reference if full_kl else None,
            gradient_checkpointing=config.model.gradient_checkpointing,
            share_prompts=config.policy.share_prompts,
        )
        rollout = ROLLOUT_ENGINES.get(config.rollout.engine)(
            model,
            tokenizer,
            max_concurrent_sequences=config.rollout.max_concurrent_sequences,
            max_prefill_tokens=config.rollout.max_prefill_tokens,
        )
        critic = start_critic(config, batches, tokenizer, device) if batches.critic else None
        return Roles(
            policy=policy,
            rollout=rollout,
            weight_sync=WEIGHT_SYNCS.get("in_memory")(),
            # In the loss, the KL over the whole vocabulary is the policy engine's work: no log-probs of the reference are asked.
            reference=None if full_kl and not config.reward.kl.coef else reference,
            notes=tuple(role.note for role in (policy, reference) if role is not None and role.note),
            critic=critic,
            reward_model=start_reward_model(config, tokenizer, device),
            device=str(device),
        )


def start_critic(
    config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> ValueEngine:
    """The critic, from its own weights or from the policy's starting weights with a new value head."""
    plan, critic = batches.critic, config.critic
    assert plan is not None and plan.total_updates is not None
    engine: ValueEngine = VALUE_ENGINES.get(critic.engine)(
        load_value_model(
            critic.path or config.model.path,
            dtype=DTYPES[config.model.compute_dtype],
            device=device,
            trust_remote_code=config.model.trust_remote_code,
            field="critic.path" if critic.path else "model.path",
        ),
        tokenizer,
        optimizer=critic.optimizer,
        learning_rate_factor=learning_rate_factor(critic.schedule, plan.total_updates),
        sequences_per_micro_batch=plan.sequences_per_micro_batch_per_device,
        max_tokens_per_micro_batch=critic.max_tokens_per_micro_batch,
        gradient_checkpointing=critic.gradient_checkpointing,
        share_prompts=config.policy.share_prompts,
    )
    return engine


def start_reward_model(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> RewardModel | None:
    """The reward model, when the reward has one."""
    model = config.reward.model
    if model is None:
        return None
    return LocalRewardModel(
        load_reward_model(model, dtype=DTYPES[config.model.compute_dtype], device=device),
        load_reward_tokenizer(model, tokenizer),
        sequences_per_micro_batch=model.sequences_per_micro_batch_per_device,
        max_tokens=model.max_tokens,
    )


def pick_device(wanted: str) -> torch.device:
    """The device a run uses.

    Raises: ConfigError when cuda is asked for and torch sees none.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            Problem("torch sees no CUDA device on this machine", fix="use auto or cpu", field="placement.device")
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def learning_rate_factor(schedule: ScheduleConfig, total_updates: int) -> Callable[[int], float]:
    """The schedule as a function of the update number."""
    warmup = schedule.warmup_updates
    if warmup is None:
        warmup = int(schedule.warmup_ratio * total_updates)
    shape = schedules.SCHEDULES[schedule.name]
    known = {
        "warmup_updates": warmup,
        "total_updates": total_updates,
        "min_lr_ratio": schedule.min_lr_ratio,
        "stable_ratio": schedule.stable_ratio,
    }
    return partial(shape, **{name: value for name, value in known.items() if name in signature(shape).parameters})
