"""One device: every role lives in this process, and sampler and trainer share one set of weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algos import schedules
from posttrain.backends.reward_model.local import LocalRewardModel
from posttrain.backends.serving.start import make_sampler, start_weight_sync
from posttrain.config import RunConfig, SftConfig, TrainingConfig
from posttrain.config.generate import GenerateConfig
from posttrain.config.policy import OptimizerConfig, ScheduleConfig
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardModel
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.train_engine import TrainEngine, ValueEngine
from posttrain.models.liger import use_liger
from posttrain.models.loading import DTYPES, load_causal_lm
from posttrain.models.lora import adapter_off, add_adapter
from posttrain.models.reward_model import load_reward_model, load_reward_tokenizer
from posttrain.models.value_head import head_name, load_value_model
from posttrain.records.notices import Notices
from posttrain.records.plans import BatchPlan, SftBatchPlan
from posttrain.registry import RUNTIMES, TRAIN_ENGINES, VALUE_ENGINES


@RUNTIMES.register("inprocess")
class InProcess:
    """See interfaces.roles.Runtime."""

    def start(self, config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase) -> Roles:
        model, device = load_policy(config)
        load = partial(
            load_causal_lm,
            dtype=DTYPES[config.model.compute_dtype],
            device=device,
            trust_remote_code=config.model.trust_remote_code,
        )
        assert batches.total_updates is not None
        engine = TRAIN_ENGINES.get(config.policy.engine)
        notices = Notices()
        reference = None
        full_kl = config.loss.kl_coef > 0 and config.loss.kl_estimator == "full"
        if config.loss.kl_coef or config.reward.kl.coef:
            start = config.reference.path or config.model.path
            shares = config.policy.lora is not None and start == config.model.path
            overrides = config.model.config_overrides if start == config.model.path else None
            reference = engine.scorer(
                model if shares else load(start, config_overrides=overrides).requires_grad_(False),
                config.reference.sequences_per_micro_batch_per_device,
                config.policy.share_prompts,
                config.reference.max_tokens_per_micro_batch,
                padded=config.model.padded,
                weights=partial(adapter_off, model) if shares else nullcontext,
                rests_on_cpu=config.reference.offload and not shares and not full_kl,
            )
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
            activation_offload=config.model.activation_offload,
            weight_decay=weight_decay_at(config.policy.optimizer, batches.total_updates),
            **how(config, notices),
        )
        rollout = make_sampler(
            config.rollout,
            config.model,
            lambda: model,
            tokenizer,
            device=device,
            seed=config.run.seed,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        critic = start_critic(config, batches, tokenizer, device, notices) if batches.critic else None
        return Roles(
            policy=policy,
            rollout=rollout,
            weight_sync=start_weight_sync(config.rollout, model, tokenizer, device=device),
            # In the loss, the KL over the whole vocabulary is the policy engine's work: no log-probs of the reference are asked.
            reference=None if full_kl and not config.reward.kl.coef else reference,
            notes=tuple(role.note for role in (policy, critic, reference, rollout) if role is not None and role.note),
            critic=critic,
            reward_model=start_reward_model(config, tokenizer, device),
            device=str(device),
            notices=notices,
        )


def load_policy(config: TrainingConfig) -> tuple[PreTrainedModel, torch.device]:
    """The model that is trained, with its adapter if it gets one, on its device."""
    device = pick_device(config.placement.device)
    if device.type == "cpu":
        torch.set_num_threads(config.placement.cpu_threads or len(os.sched_getaffinity(0)))
    torch.manual_seed(config.run.seed)
    model = load_causal_lm(
        config.model.path,
        dtype=DTYPES[config.model.compute_dtype],
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        config_overrides=config.model.config_overrides,
    )
    if config.model.liger:
        use_liger(model)
    if config.policy.lora:
        add_adapter(model, config.policy.lora, seed=config.run.seed)
    return model, device


def start_sft(
    config: SftConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase
) -> tuple[TrainEngine, torch.device, Notices]:
    """The policy alone, and what it has to tell while it works."""
    model, device = load_policy(config)
    notices = Notices()
    assert batches.schedule_updates is not None
    learner = config.policy
    engine: TrainEngine = TRAIN_ENGINES.get(learner.engine)(
        model,
        tokenizer,
        optimizer=learner.optimizer,
        learning_rate_factor=learning_rate_factor(learner.schedule, batches.schedule_updates),
        sequences_per_micro_batch=batches.sequences_per_micro_batch_per_device,
        max_tokens_per_micro_batch=batches.max_tokens_per_micro_batch,
        sequences_per_scoring_batch=learner.sequences_per_micro_batch_per_device,
        max_tokens_per_scoring_batch=batches.max_tokens_per_micro_batch,
        gradient_checkpointing=config.model.gradient_checkpointing,
        activation_offload=config.model.activation_offload,
        weight_decay=weight_decay_at(learner.optimizer, batches.schedule_updates),
        **how(config, notices),
    )
    return engine, device, notices


def how(config: TrainingConfig, notices: Notices) -> dict[str, Any]:
    """The ways of computing that all trained models share."""
    return {
        "share_prompts": isinstance(config, RunConfig) and config.policy.share_prompts,
        "padded": config.model.padded,
        "compile_layers": config.model.compile,
        "master_dtype": DTYPES[config.model.master_dtype],
        "seed": config.run.seed,
        "notices": notices,
    }


def start_critic(
    config: RunConfig,
    batches: BatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    notices: Notices,
) -> ValueEngine:
    """The critic, from its own weights or from the policy's starting weights with a new value head."""
    plan, critic = batches.critic, config.critic
    assert plan is not None and plan.total_updates is not None
    model = load_value_model(
        critic.path or config.model.path,
        dtype=DTYPES[config.model.compute_dtype],
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        field="critic.path" if critic.path else "model.path",
    )
    if config.model.liger:
        use_liger(model)
    if critic.lora:
        add_adapter(model, critic.lora, seed=config.run.seed, head=head_name(model), field="critic.lora")
    engine: ValueEngine = VALUE_ENGINES.get(critic.engine)(
        model,
        tokenizer,
        optimizer=critic.optimizer,
        learning_rate_factor=learning_rate_factor(critic.schedule, plan.total_updates),
        sequences_per_micro_batch=plan.sequences_per_micro_batch_per_device,
        max_tokens_per_micro_batch=critic.max_tokens_per_micro_batch,
        gradient_checkpointing=critic.gradient_checkpointing,
        activation_offload=critic.activation_offload,
        weight_decay=weight_decay_at(critic.optimizer, plan.total_updates),
        **how(config, notices),
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
        "total_updates": schedule.decay_updates or total_updates,
        "warmup_start_ratio": schedule.warmup_start_ratio,
        "min_lr_ratio": schedule.min_lr_ratio,
        "cycles": schedule.cycles,
        "stable_ratio": schedule.stable_ratio,
        "decay": schedule.decay,
    }
    return partial(shape, **{name: value for name, value in known.items() if name in signature(shape).parameters})


def weight_decay_at(optimizer: OptimizerConfig, total_updates: int) -> Callable[[int], float]:
    """The weight decay as a function of the update number."""
    return partial(
        schedules.weight_decay,
        total_updates=total_updates,
        start=optimizer.weight_decay,
        end=optimizer.weight_decay if optimizer.weight_decay_end is None else optimizer.weight_decay_end,
        shape=optimizer.weight_decay_shape,
    )


def start_sampler(config: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[RolloutEngine, torch.device]:
    """A sampler with a model of its own, for a run that trains nothing."""
    device = pick_device(config.placement.device)
    if device.type == "cpu":
        torch.set_num_threads(config.placement.cpu_threads or len(os.sched_getaffinity(0)))

    def load() -> PreTrainedModel:
        return load_causal_lm(
            config.model.path,
            dtype=DTYPES[config.model.compute_dtype],
            device=device,
            trust_remote_code=config.model.trust_remote_code,
            config_overrides=config.model.config_overrides,
        ).requires_grad_(False)

    engine = make_sampler(
        config.rollout,
        config.model,
        load,
        tokenizer,
        device=device,
        seed=0,  # of the server's own random numbers; every request has its seed
        max_prompt_tokens=config.data.max_prompt_tokens,
    )
    return engine, device
