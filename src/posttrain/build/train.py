"""The one place where names in a RunConfig become objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.backends.environments.start import start_worlds
from posttrain.backends.tracking.jsonl import Jsonl
from posttrain.config import RunConfig
from posttrain.config.model import ModelConfig
from posttrain.config.profiling import ProfilingConfig
from posttrain.config.roles import needs_old_logprobs, runtime_of
from posttrain.config.rollout import SamplingConfig
from posttrain.data.episodes import training_episodes, validation_episodes
from posttrain.data.loader import ShuffledLoader
from posttrain.data.prompts import PromptSet, load_prompts, unread_image_settings
from posttrain.data.token_texts import token_texts_of
from posttrain.errors import ConfigError, ModelError, Problem
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.tracker import Tracker, Uploader
from posttrain.loops import rl_sync
from posttrain.loops.rl_plan import RunPlan, StepPlan
from posttrain.models.loading import import_modules, load_model_config, load_tokenizer, override_config, positions_of
from posttrain.models.processors import load_processor
from posttrain.plan.batch import plan_batches
from posttrain.plan.checks.images import image_problems
from posttrain.records.plans import (
    AdvantagePlan,
    BatchPlan,
    CriticBatchPlan,
    CriticUpdatePlan,
    GroupFilterPlan,
    KlRewardPlan,
    LossPlan,
    ProfilePlan,
    RewardPlan,
    RolloutCorrectionPlan,
    UpdatePlan,
    ValueLossPlan,
)
from posttrain.records.prompts import Prompt
from posttrain.records.rejection import rejection_rules
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, RUNTIMES, TRACKERS
from posttrain.rewards.no_terms import NothingToScore
from posttrain.rewards.scorer import Scorer
from posttrain.rewards.served import start_scorer, term_names
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.frame import begin_run, contents, retention, under_way
from posttrain.run.lock import only_trainer
from posttrain.run.relay import Relay
from posttrain.run.run_folder import RunFolder
from posttrain.run.trackers import Trackers
from posttrain.steps.shape_rewards import RewardState


def train_run(config: RunConfig, *, allow_config_change: bool = False) -> Path:
    """Run it, from the data to the last checkpoint. Returns the run folder.

    Args: allow_config_change goes on with a run although something has changed that its numbers depend on.
    Raises: RequestError for what can be seen before the first step; RunStopped and RunInterrupted as the loop says.
    """
    folder = RunFolder(config)
    checkpoints = Checkpoints(
        folder.checkpoints, retention(config.checkpoint), folder.origin, contents(config.checkpoint)
    )
    with only_trainer(folder.path, *([folder.checkpoints] if config.checkpoint.folder else [])) as notes:
        folder.check(holds_checkpoint=checkpoints.exist(), allow_config_change=allow_config_change)
        with closing(run_scorer(config)) as scorer:
            return _train(config, folder, checkpoints, notes, scorer)


def _train(
    config: RunConfig, folder: RunFolder, checkpoints: Checkpoints, notes: list[str], scorer: GroupScorer
) -> Path:
    import_modules(config.model.external_modules)
    tokenizer = load_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data)
    if config.environment.train_episodes is not None:
        training = PromptSet.generated(training_episodes(config.environment))
    else:
        training = load_prompts(config.data.train_files, config.data, tokenizer, what="training", processor=processor)
    overlong = training.overlong_message("training")
    validation: Sequence[Prompt] = validation_episodes(config.environment)[: config.validation.max_prompts]
    if config.data.validation_files:
        files = config.data.validation_files
        held_out = load_prompts(files, config.data, tokenizer, what="validation", processor=processor)
        validation = held_out.prompts[: config.validation.max_prompts]
        overlong += held_out.overlong_message("validation")
    training_prompts = training.prompts[: config.data.max_prompts]
    batches, problems = plan_batches(config, len(training_prompts))
    if batches is None:
        raise ConfigError(problems)
    order_seed = config.run.seed if config.data.seed is None else config.data.seed
    loader = ShuffledLoader(
        training_prompts, config.data.prompts_per_step, seed=order_seed, shuffle=config.data.shuffle
    )
    if any(prompt.images for prompt in (*training_prompts, *validation)) and (problems := [*image_problems(config)]):
        raise ConfigError(problems)
    unread = unread_image_settings(config.data, [*training_prompts, *validation])
    positions = check_fit(config, training_prompts, validation)
    if batches.critic:
        check_critic_fits(config, tokenizer, training_prompts)
    plan = run_plan(config, batches, validation)
    trackers = Trackers([Jsonl(folder.path)], [tracker(name, folder.path) for name in config.tracking.trackers])

    with ExitStack() as started:
        roles = started.enter_context(
            closing(RUNTIMES.get(runtime_of(config.placement))().start(config, batches, tokenizer))
        )
        if config.environment.used:
            worlds = start_worlds(config, tokenizer, positions, [*training_prompts, *validation])
            started.callback(worlds.host.close)
            roles = replace(roles, worlds=worlds)
        rewards = RewardState(plan.step.reward.kl)
        first_step = checkpoints.restore(roles.policy, loader, trackers.message, roles.critic, rewards) + 1
        scorer.keep_in(folder.path)
        begin_run(
            config,
            folder,
            checkpoints,
            trackers,
            first_step=first_step,
            total_steps=plan.total_steps,
            device=roles.device,
            notes=[*notes, *overlong, *unread, *roles.notes],
        )
        with under_way(config, folder, checkpoints, trackers) as stop:
            rl_sync.run(
                roles,
                scorer,
                loader,
                plan,
                rewards=rewards,
                first_step=first_step,
                folder=folder.path,
                checkpoints=checkpoints,
                trackers=trackers,
                stop=stop,
                token_texts=token_texts_of(tokenizer),
            )
    return folder.path


def tracker(name: str, folder: Path) -> Tracker:
    """One that shows the run itself, or a service, which is sent what is in the run folder."""
    made = TRACKERS.get(name)()
    return Relay(name, made, folder) if isinstance(made, Uploader) else made


def run_scorer(config: RunConfig) -> Scorer:
    """Raises: ConfigError with the problems of all terms."""
    if config.environment.used and not config.reward.terms and config.reward.model is None:
        return NothingToScore()
    return start_scorer(config.reward)


def check_fit(config: RunConfig, training: Sequence[Prompt], validation: Sequence[Prompt]) -> float:
    """Whether the model can read the prompts and has positions for them and their responses. Returns its positions.

    Raises: ConfigError. Rotary embeddings would go on beyond the last position, with a model that never saw one there.
    """
    whole = load_model_config(config.model.path, config.model.trust_remote_code)
    override_config(whole, config.model.config_overrides)
    model = whole.get_text_config()
    problems = []
    highest = max((max(prompt.token_ids, default=0) for prompt in [*training, *validation]), default=0)
    if highest >= model.vocab_size:
        what = f"the tokenizer makes token id {highest}, and the model knows {model.vocab_size} tokens"
        field = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
        problems.append(Problem(what, fix="use the model's own tokenizer", field=field))
    positions = positions_of(model)
    validation_tokens = config.validation.max_response_tokens or config.rollout.max_response_tokens
    validation_field = f"{'validation' if config.validation.max_response_tokens else 'rollout'}.max_response_tokens"
    for what, prompts, tokens, field in (
        ("training", training, config.rollout.max_response_tokens, "rollout.max_response_tokens"),
        ("validation", validation, validation_tokens, validation_field),
    ):
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if longest + tokens > positions:
            text = (
                f"the longest {what} prompt ({longest} tokens) and a response of up to {tokens} do not fit into the "
                f"{positions:.0f} positions of the model"
            )
            fix = f"lower {field}, or data.max_prompt_tokens with data.overlong_prompts"
            problems.append(Problem(text, fix=fix, field=field))
    if problems:
        raise ConfigError(problems)
    return positions


def check_critic_fits(config: RunConfig, tokenizer: PreTrainedTokenizerBase, training: Sequence[Prompt]) -> None:
    """Whether a critic that starts from another model than the policy can read what the policy reads and writes.

    Raises: ConfigError. With other token ids it would read another text, and nothing else would show it.
    """
    path = config.critic.path
    if path is None:
        return
    model = load_model_config(path, config.model.trust_remote_code, field="critic.path").get_text_config()
    fix = "use a critic of the policy's family"
    problems = []
    if len(tokenizer) > model.vocab_size:
        what = f"the policy's tokenizer has {len(tokenizer)} tokens, and the critic knows {model.vocab_size}"
        problems.append(Problem(what, fix=fix, field="critic.path"))
    with suppress(ModelError):  # a folder without a tokenizer says nothing about its token ids
        own = load_tokenizer(ModelConfig(path=path, trust_remote_code=config.model.trust_remote_code)).get_vocab()
        other = [token for token, index in tokenizer.get_vocab().items() if own.get(token, index) != index]
        if other:
            what = f"the critic's token ids are not the policy's: {len(other)} tokens differ, such as {min(other)!r}"
            problems.append(Problem(what, fix=fix, field="critic.path"))
    longest = max(len(prompt.token_ids) for prompt in training) + config.rollout.max_response_tokens
    if longest > positions_of(model):
        what = (
            f"the longest training prompt and a response make up to {longest} tokens, which do not fit into the "
            f"{positions_of(model):.0f} positions of the critic"
        )
        problems.append(Problem(what, fix="lower rollout.max_response_tokens, or " + fix, field="critic.path"))
    if problems:
        raise ConfigError(problems)


def run_plan(config: RunConfig, batches: BatchPlan, validation: Sequence[Prompt]) -> RunPlan:
    """What the loop is told, from the configuration."""
    assert batches.total_steps is not None and batches.steps_per_epoch is not None
    correction = config.loss.rollout_correction
    loss = LossPlan(
        name=config.loss.name,
        parameters=chosen_parameters(POLICY_LOSSES.get(config.loss.name), config.loss),
        aggregation=config.loss.aggregation,
        norm_tokens=config.loss.norm_tokens or config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        use_rollout_logprobs=correction.use_rollout_logprobs,
        sft_coef=config.loss.sft_coef,
        entropy_coef=config.loss.entropy_coef,
        kl_coef=config.loss.kl_coef,
        kl_estimator=config.loss.kl_estimator,
    )
    step = StepPlan(
        prompts=batches.prompts_per_step,
        sampling=sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed),
        advantage=AdvantagePlan(
            name=config.advantage.name,
            parameters=_advantage_parameters(config),
            whiten_rewards=config.advantage.whiten_rewards,
            whiten=config.advantage.whiten,
            clip=config.advantage.clip,
        ),
        group_filter=GroupFilterPlan(**config.group_filter.model_dump()),
        reward=reward_plan(config),
        mask_truncated=config.loss.mask_truncated,
        update=UpdatePlan(
            loss=loss,
            epochs=batches.epochs_per_step,
            sequences_per_update=batches.sequences_per_update,
            on_policy=(batches.on_policy or correction.use_rollout_logprobs) and not needs_old_logprobs(config),
            correction=RolloutCorrectionPlan(
                weights=correction.weights,
                weight_high=correction.weight_high,
                weight_low=correction.weight_low,
                normalize=correction.normalize,
                rules=rejection_rules(correction.reject, correction.reject_bounds),
            ),
        ),
        max_invalid_share=config.reward.max_invalid_share,
        critic_update=critic_update_plan(config, batches.critic) if batches.critic else None,
    )
    validation_tokens = config.validation.max_response_tokens or config.rollout.max_response_tokens
    return RunPlan(
        step=step,
        seed=config.run.seed,
        validation_sampling=sampling_params(config.validation, validation_tokens, config.run.seed),
        validation_prompts=validation,
        total_steps=batches.total_steps,
        steps_per_epoch=batches.steps_per_epoch,
        max_skipped_steps=config.run.max_skipped_steps,
        validate_every=config.validation.every_steps,
        validate_before=config.validation.before_training,
        validate_after=config.validation.after_training,
        validation_logprobs=config.validation.trainer_logprobs,
        save_every=config.checkpoint.every_steps,
        save_at_end=config.checkpoint.at_end,
        save_in_background=config.checkpoint.background,
        export_every=config.checkpoint.export_every_steps,
        export_folder=Path(config.checkpoint.export_folder or Path(config.folder) / "exports"),
        samples_every=config.tracking.samples_every_steps,
        batches_every=config.tracking.batches_every_steps,
        critic_warmup_steps=batches.critic.warmup_steps if batches.critic else 0,
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
        max_response_tokens=config.rollout.max_response_tokens,
        overlong_buffer_tokens=reward.overlong_buffer_tokens,
        overlong_penalty=reward.overlong_penalty,
        zero_unless_stopped=reward.zero_unless_stopped,
        by_turn=reward.by_turn,
        normalize_mean=reward.normalize_mean,
        normalize_std=reward.normalize_std,
        clip=reward.clip,
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
    )


def _advantage_parameters(config: RunConfig) -> dict[str, Any]:
    """As ``chosen_parameters``; weights of terms are for the terms of the reward in their order, whichever a step has."""
    chosen = chosen_parameters(ADVANTAGES.get(config.advantage.name), config.advantage)
    if chosen.get("term_weights") and not chosen["terms"]:
        reward = config.reward
        parts = [*(["model"] if reward.model else []), *(["overlong"] if reward.overlong_buffer_tokens else [])]
        chosen["terms"] = [*term_names(reward.terms), *parts]
    return chosen


def chosen_parameters(function: Callable[..., Any], section: Any) -> dict[str, Any]:
    """The fields of a config section that a registered function asks for by keyword."""
    keywords = inspect.signature(function).parameters.values()
    return {
        keyword.name: getattr(section, keyword.name)
        for keyword in keywords
        if keyword.kind is keyword.KEYWORD_ONLY and hasattr(section, keyword.name)
    }


def sampling_params(config: SamplingConfig, max_response_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
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
