"""Build the plans of the loops from a config: plain values with everything that a step or a run has to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.distillation import OnPolicyDistillationConfig
from posttrain.config.profiling import ProfilingConfig
from posttrain.config.rejection import rejection_rules
from posttrain.config.roles import (
    chooses_before,
    needs_old_logprobs,
    replaces_old_logprobs,
    samples_beside_training,
    uses_reference,
)
from posttrain.config.rollout import RolloutConfig, SamplingConfig
from posttrain.config.sft import SftConfig
from posttrain.loops.rl_plan import AsyncPlan, RunPlan
from posttrain.loops.sft import LOSS
from posttrain.loops.training import LoopPlan
from posttrain.plan.batch import process_sequences_per_update, samples_divide_by
from posttrain.records.batch_plans import BatchPlan, CriticBatchPlan, SftBatchPlan
from posttrain.records.plans import (
    AdvantagePlan,
    CriticUpdatePlan,
    DistillationPlan,
    DomainPlan,
    GroupFilterPlan,
    JudgePlan,
    KlRewardPlan,
    LossPlan,
    ProcessRewardPlan,
    ProfilePlan,
    ResamplingPlan,
    RewardPlan,
    RolloutCorrectionPlan,
    StepPlan,
    UpdatePlan,
    ValueLossPlan,
)
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams
from posttrain.rewards.served import term_names
from posttrain.user_files import absolute


def run_plan(
    config: RunConfig, batches: BatchPlan, validation: Sequence[Prompt], pad_token: int | None = None
) -> RunPlan:
    """Build the plan of a reinforcement-learning run. ``pad_token`` is the tokenizer's, which estimators written for verl see
    behind responses."""
    assert batches.total_steps is not None, "the number of steps is planned from the data"
    correction = config.loss.rollout_correction
    corrected = RolloutCorrectionPlan(
        weights=correction.weights,
        weight_high=correction.weight_high,
        weight_low=correction.weight_low,
        normalize=correction.normalize,
        rules=rejection_rules(correction.reject, correction.reject_bounds),
        interpolated=correction.proximal == "loglinear",
    )
    loss = LossPlan(
        name=config.loss.name,
        path=absolute(config.loss.path) if config.loss.path else None,
        parameters=config.loss.settings,
        aggregation=config.loss.aggregation,
        entropy_aggregation=config.loss.entropy_aggregation,
        norm_tokens=config.loss.norm_tokens or config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        use_rollout_logprobs=correction.use_rollout_logprobs,
        policy_coef=config.loss.policy_coef,
        topr_coef=config.loss.topr_coef,
        sft_coef=config.loss.sft_coef,
        entropy_coef=config.loss.entropy_coef,
        kl_coef=config.loss.kl_coef,
        kl_estimator=config.loss.kl_estimator,
        kl_aggregation=config.loss.kl_aggregation,
        kl_importance_weighted=config.loss.kl_importance_weighted,
        router_balance_coef=config.loss.router_balance_coef,
        off_policy_limit=config.loss.off_policy_limit,
        high_entropy_share=config.loss.high_entropy_share,
        chooses_before=chooses_before(config),
        correction=corrected if corrected.interpolated else None,
    )
    distillation = distillation_plan(config)
    if distillation and distillation.as_loss:
        loss = replace(loss, distillation=distillation, policy_coef=0.0 if distillation.alone else loss.policy_coef)
    step = StepPlan(
        prompts=batches.prompts_per_step,
        sampling=replace(
            sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed),
            extra_episodes=config.environment.extra_episodes,
        ),
        advantage=AdvantagePlan(
            name=config.advantage.name,
            path=absolute(config.advantage.path) if config.advantage.path else None,
            parameters=_advantage_parameters(config),
            whiten_rewards=config.advantage.whiten_rewards,
            whiten=config.advantage.whiten,
            clip=config.advantage.clip,
            pad_token=pad_token or 0,
        ),
        resampling=ResamplingPlan(
            **(config.resampling.model_dump() | {"multiple_of": samples_divide_by(config, batches)})
        ),
        group_filter=GroupFilterPlan(**config.group_filter.model_dump()),
        domains=tuple(
            DomainPlan(
                name=name,
                sources=tuple(domain.sources),
                prompts=domain.prompts_per_step,
                group_filter=GroupFilterPlan(**(domain.group_filter or config.group_filter).model_dump()),
            )
            for name, domain in config.data.domains.items()
        ),
        domain_statistics=config.data.domain_statistics,
        statistics_of=tuple(config.environment.named) if config.environment.statistics_by_name else (),
        reward=reward_plan(config),
        turn_is_response=config.environment.turn_is_response,
        similar_states=config.environment.similar_states,
        mask_truncated=config.loss.mask_truncated,
        mask_long_wrong_tokens=config.loss.mask_long_wrong_tokens,
        weigh_by=tuple(config.loss.weigh_by),
        update=UpdatePlan(
            loss=loss,
            epochs=batches.epochs_per_step,
            sequences_per_update=batches.sequences_per_update,
            shuffle_seed=shuffle_seed(config, "policy"),
            full_kl_in_reward=config.reward.kl.coef > 0 and config.reward.kl.estimator == "full",
            on_policy=(batches.on_policy or replaces_old_logprobs(config)) and not needs_old_logprobs(config),
            replays_experts=config.policy.routing_replay,
            correction=corrected,
        ),
        max_invalid_share=1.0 if config.distillation.alone else config.reward.max_invalid_share,
        distillation=distillation,
        teacher_sources={name: frozenset(each.data_sources) for name, each in config.distillation.teachers.items()},
        critic_update=critic_update_plan(config, batches.critic) if batches.critic else None,
        process_reward=process_reward_plan(config, batches),
    )
    validation_tokens = config.validation.max_response_tokens or config.rollout.max_response_tokens
    return RunPlan(
        step=step,
        loop=loop_plan(
            config,
            batches.total_steps,
            most_epochs=most_epochs(config),
            validate_every=[config.validation.every_steps],
            save_every=[config.checkpoint.every_steps],
            validates=bool(validation),
        ),
        seed=config.run.seed,
        validation_sampling=sampling_params(config.validation, validation_tokens, config.run.seed),
        validation_prompts=validation,
        samples_every=config.tracking.samples_every_steps,
        batches_every=config.tracking.batches_every_steps,
        validation_logprobs=config.validation.trainer_logprobs,
        critic_warmup_steps=batches.critic.warmup_steps if batches.critic else 0,
        reference_every=config.reference.update_every if uses_reference(config) else None,
        reference_mix=config.reference.update_mix,
        asynchronous=async_plan(config),
    )


def distillation_plan(config: TrainingConfig) -> DistillationPlan | None:
    """Build the plan of learning from teachers; None without one."""
    section = config.distillation
    if not section.used:
        return None
    on_policy = section if isinstance(section, OnPolicyDistillationConfig) else None
    sampling = config.rollout.temperature if isinstance(config, RunConfig) else 1.0
    chosen = section.divergence
    return DistillationPlan(
        name=chosen.name,
        path=absolute(chosen.path) if chosen.path else None,
        parameters=chosen.settings,
        of_sampled_tokens=section.of_sampled_tokens,
        teachers={name: teacher.coef for name, teacher in section.teachers.items()},
        coef=section.coef,
        as_loss=on_policy is None or on_policy.enters == "loss",
        alone=on_policy is not None and on_policy.alone,
        top_k=None if section.of_sampled_tokens else section.top_k,
        rest=section.top_k_rest,
        temperature=sampling if section.temperature is None else section.temperature,
        teacher_temperature=section.teacher_temperature,
        min_logprob=section.min_logprob,
        clip=section.clip,
    )


def async_plan(config: RunConfig) -> AsyncPlan | None:
    """Build the plan of sampling ahead; None for a synchronous run."""
    section = config.asynchronous
    if section.mode == "off" or config.validation.only:
        return None
    return AsyncPlan(
        mode=section.mode,
        staleness_steps=section.max_staleness_steps,
        on_stale=section.on_stale,
        max_running_groups=section.max_running_groups,
        in_thread=samples_beside_training(config),
        sync_every_steps=section.sync_every_steps,
        sync_between_tokens=section.sync_between_tokens,
        wait_timeout_s=section.wait_timeout_s,
        prepared_groups=section.prepared_groups,
        keeps_cache=section.cache_on_new_weights == "keep",
    )


def most_epochs(config: RunConfig) -> int | None:
    """Return the passes over the data that end a run whose steps may draw several batches; None where its steps are counted: with
    run.total_steps alone, ahead of training, and of sources that are drawn from at rates of their own."""
    run, data = config.run, config.data
    counts = run.total_steps is not None and not run.within_epochs
    draws_more = config.group_filter.strategy in ("refill", "replace")
    if counts or not draws_more or config.asynchronous.mode != "off" or data.domains or data.curriculum:
        return None
    return run.total_epochs


def loop_plan(
    config: RunConfig | SftConfig,
    total_steps: int,
    *,
    validate_every: Sequence[int | None],
    save_every: Sequence[int | None],
    validates: bool,
    most_epochs: int | None = None,
) -> LoopPlan:
    """Build the plan of the loop around the steps. ``validates``: there are held-out prompts or texts."""
    return LoopPlan(
        total_steps=total_steps,
        most_epochs=most_epochs,
        max_skipped_steps=config.run.max_skipped_steps,
        validate_every=tuple(every for every in validate_every if every is not None),
        validate_before=config.validation.before_training and validates,
        validate_after=config.validation.after_training,
        validate_only=isinstance(config, RunConfig) and config.validation.only,
        save_every=tuple(every for every in save_every if every is not None),
        save_at_end=config.checkpoint.at_end,
        save_in_background=config.checkpoint.background,
        expiry_margin_s=config.checkpoint.before_expiry_s,
        export_every=config.checkpoint.export_every_steps,
        export_folder=Path(config.checkpoint.export_folder or Path(config.folder) / "exports"),
        profile=profile_plan(config.profiling),
    )


def profile_plan(config: ProfilingConfig) -> ProfilePlan:
    return ProfilePlan(
        steps=None if config.steps == "all" else tuple(config.steps),
        phases=tuple(config.phases),
        operators=config.operators,
        shapes=config.shapes,
        stacks=config.stacks,
        memory=config.memory,
        ranks=None if config.ranks == "all" else tuple(config.ranks),
        folder=Path(config.folder) if config.folder is not None else None,
    )


def reward_plan(config: RunConfig) -> RewardPlan:
    reward = config.reward
    return RewardPlan(
        model_weight=reward.model.weight if reward.model else 1.0,
        judges={
            name: JudgePlan(weight=each.weight, data_sources=frozenset(each.data_sources))
            for name, each in reward.judges.items()
        },
        max_response_tokens=config.rollout.max_response_tokens,
        overlong_buffer_tokens=reward.overlong_buffer_tokens,
        overlong_penalty=reward.overlong_penalty,
        zero_unless_stopped=reward.zero_unless_stopped,
        by_turn=reward.by_turn,
        normalize_mean=reward.normalize_mean,
        normalize_std=reward.normalize_std,
        clip=reward.clip,
        clip_tokens=reward.clip_tokens,
        kl=KlRewardPlan(**reward.kl.model_dump()),
    )


def critic_update_plan(config: RunConfig, batches: CriticBatchPlan) -> CriticUpdatePlan:
    return CriticUpdatePlan(
        loss=ValueLossPlan(
            value_clip=config.critic.value_clip,
            aggregation=config.critic.aggregation,
            norm_tokens=config.loss.norm_tokens or config.rollout.max_response_tokens,
        ),
        epochs=batches.epochs_per_step,
        sequences_per_update=batches.sequences_per_update,
        shuffle_seed=shuffle_seed(config, "critic"),
    )


def process_reward_plan(config: RunConfig, batches: BatchPlan) -> ProcessRewardPlan | None:
    """Build the plan of the process reward model; None without one."""
    process = config.reward.process
    if process is None:
        return None
    return ProcessRewardPlan(
        loss=LossPlan(
            name="outcome_cross_entropy",
            parameters={"log_ratio_scale": process.log_ratio_scale},
            aggregation="sequence_mean_token_mean",
            temperature=1.0,
        ),
        update=process.update,
        sequences_per_update=process_sequences_per_update(config, batches),
        log_ratio_scale=process.log_ratio_scale,
        normalize=process.normalize,
    )


def shuffle_seed(config: RunConfig, role: str) -> int | None:
    """Return the seed of the draws of a role's mini-batches; None where they are taken in order."""
    policy, critic = config.policy, config.critic
    draws, seed = policy.shuffle, policy.shuffle_seed
    if role == "critic":
        draws = draws if critic.shuffle is None else critic.shuffle
        seed = seed if critic.shuffle_seed is None else critic.shuffle_seed
    if not draws:
        return None
    return config.run.seed if seed is None else seed


def _advantage_parameters(config: RunConfig) -> dict[str, Any]:
    """The estimator's settings; weights of terms are for the terms of the reward in their order, whichever a step has."""
    chosen = config.advantage.settings
    if chosen.get("term_weights") and not chosen.get("terms", True):
        reward = config.reward
        parts = [
            *(["model"] if reward.model else []),
            *reward.judges,
            *(["overlong"] if reward.overlong_buffer_tokens else []),
        ]
        chosen["terms"] = [*term_names(reward.terms), *parts]
    return chosen


def sampling_params(config: SamplingConfig, max_response_tokens: int, seed: int) -> SamplingParams:
    hot = config.first_token_temperature if isinstance(config, RolloutConfig) else None
    return SamplingParams(
        first_token_temperature=hot,
        first_token_top_k=config.first_token_top_k if isinstance(config, RolloutConfig) and hot is not None else 0,
        samples_per_prompt=config.samples_per_prompt,
        max_response_tokens=max_response_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        stop=tuple(config.stop),
        stop_token_ids=tuple(config.stop_token_ids),
        ignore_eos=config.ignore_eos,
        engine_sampling=config.engine_sampling,
        seed=seed,
    )


def text_loss_plan(config: SftConfig) -> LossPlan:
    """Build the loss of a supervised run: the mean of -log pi over the learned tokens of the whole step, whatever the
    micro-batches are; with teachers, text_coef of it and the mean divergence from them."""
    distillation = distillation_plan(config)
    if distillation is None:
        return LOSS
    return replace(LOSS, policy_coef=config.distillation.text_coef, distillation=distillation)


def sft_plan(config: SftConfig, batches: SftBatchPlan, *, validates: bool) -> LoopPlan:
    """Build the plan of a supervised run. ``validates``: there are held-out texts."""
    assert batches.total_steps is not None, "the number of steps is planned from the data"
    each_epoch = batches.steps_per_epoch
    return loop_plan(
        config,
        batches.total_steps,
        validate_every=[config.validation.every_steps, each_epoch if config.validation.each_epoch else None],
        save_every=[config.checkpoint.every_steps, each_epoch if config.checkpoint.each_epoch else None],
        validates=validates,
    )
