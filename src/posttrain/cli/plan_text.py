"""The plan of a training run, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

from posttrain.cli.box_text import box_text
from posttrain.cli.plan_async import asynchronous_text
from posttrain.cli.plan_devices import devices_text, memory_text, traffic_text
from posttrain.cli.plan_plain import closing, document
from posttrain.cli.plan_rewards import reward_text
from posttrain.cli.plan_teachers import reads_policy_loss, teachers_text
from posttrain.cli.plan_worlds import episodes_text, worlds_text
from posttrain.cli.request import TrainRequest, check_request, other_file_problems
from posttrain.config import RunConfig
from posttrain.config.group_filter import GroupFilterConfig
from posttrain.config.lora import LoraConfig
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig, ScheduleConfig
from posttrain.config.reading.validate import show
from posttrain.config.roles import draws_no_prompts
from posttrain.config.rollout import RolloutConfig, SamplingConfig
from posttrain.plan.batch import process_sequences_per_update, samples_divide_by
from posttrain.plan.estimate import estimate, process_shapes
from posttrain.plan.model_files import is_hub_id
from posttrain.plan.model_shape import read_shape
from posttrain.plan.step_traffic import step_traffic
from posttrain.records.batch_plans import BatchPlan, CriticBatchPlan

__all__ = ["check_request", "other_file_problems", "plan_json", "plan_text"]


def plan_json(request: TrainRequest) -> str:
    """Return the plan as JSON (plan_plain.document); ``derived`` holds batch plan and placement."""
    derived = {
        "world_size": request.batches.devices,
        **asdict(request.batches),
        "placement": asdict(request.placement),
    }
    return json.dumps(document(request.loaded, derived), indent=2)


def plan_text(request: TrainRequest) -> str:
    """Format the plan in three parts (settings, one step, the whole run), then the warnings."""
    config = request.loaded.config
    memory = estimate(config, request.batches, request.placement)
    parts = [
        _settings_text(request),
        _step(request),
        devices_text(request.placement),
        memory_text(memory, request.placement, config.model.path),
        _whole_run(request),
    ]
    shape = read_shape(config.model.path) if config.placement.devices > 1 else None
    if shape is not None:
        traffic = step_traffic(config, request.batches, request.placement, shape)
        parts.insert(4, traffic_text(traffic))
    if box := box_text(config):
        parts.append("\n".join(box))
    parts += closing(request.loaded)
    if request.loaded.unsupported and (config.placement.devices > 1 or config.rollout.engine != "native"):
        parts.append("With --here it runs on the single device of this machine, and prints every change.")
    if config.data.overlong_prompts == "filter" and request.training_prompts is not None:
        parts.append("Prompts that the overlong filter drops are still counted here: they are known once tokenized.")
    return "\n\n".join(parts)


def _settings_text(request: TrainRequest) -> str:
    config = request.loaded.config
    rows = [
        ("run", f"{config.run.name}, into {config.folder}, seed {config.run.seed}"),
        ("model", model_text(config.model)),
        (
            "data",
            episodes_text(config.environment.train_episodes)
            or ("none: the run only validates" if draws_no_prompts(config) else "")
            or f"{files_text(config.data.train_files)}{_prompts(request.training_prompts)}",
        ),
        *([("images", f"{request.images}; each counts in max_prompt_tokens")] if request.images else []),
        ("validation", _validation(request)),
        ("rollout", f"{config.rollout.engine}, {_weights(config.rollout)}{_sampling(config.rollout)}"),
        *([("ahead", ahead)] if (ahead := asynchronous_text(config, request.loaded.words)) else []),
        *([("worlds", worlds)] if (worlds := worlds_text(config)) else []),
        ("reward", reward_text(config)),
        *([("domains", _domains(config))] if config.data.domains else []),
        *([("groups", _groups(config.group_filter))] if config.group_filter.strategy != "none" else []),
        *([("teachers", teachers_text(config))] if config.distillation.used else []),
        *([("advantage", _advantage(config))] if not config.distillation.alone else []),
        *([("drawn", drawn)] if (drawn := _drawn(config)) else []),
        *([("loss", _loss(config))] if reads_policy_loss(config) else []),
        *([("adapter", lora_text(config.policy.lora))] if config.policy.lora else []),
        ("optimizer", optimizer_text(config.policy.optimizer, config.policy.schedule)),
        *([("critic", _critic(config, request.batches.critic))] if request.batches.critic else []),
        *([("process", _process_reward(config, request.batches))] if config.reward.process else []),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in rows)


def model_text(model: ModelConfig) -> str:
    """Describe the weights and their precisions, in two lines."""
    kind = "hub id; no such folder here" if is_hub_id(model.path) else "folder"
    return f"{model.path} ({kind})\n{'':<11}{model.master_dtype} weights, {model.compute_dtype} compute"


def lora_text(lora: LoraConfig) -> str:
    """Describe the adapter and the layers that it changes."""
    if lora.adapter_path is not None:
        return f"LoRA, from {lora.adapter_path}: only the adapter is trained and saved"
    layers = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    return f"LoRA on {layers}, rank {lora.rank}, alpha {lora.alpha:g}: only the adapter is trained and saved"


def files_text(files: list[str]) -> str:
    if not files:
        return "no file"
    return files[0] if len(files) == 1 else f"{len(files)} files, {files[0]} first"


def _prompts(count: int | None) -> str:
    return "" if count is None else f": {count} prompts"


def _validation(request: TrainRequest) -> str:
    config = request.loaded.config
    episodes = episodes_text(config.environment.validation_episodes)
    if not config.data.validation_files and not episodes:
        return "none"
    rule = config.validation
    when = [
        *(["before training"] if rule.before_training else []),
        *([f"every {rule.every_steps} steps"] if rule.every_steps else []),
        *(["after training"] if rule.after_training else []),
    ]
    when = ["of the starting weights, and nothing else"] if rule.only else when
    files = episodes or f"{files_text(config.data.validation_files)}{_prompts(request.validation_prompts)}"
    if rule.max_prompts is not None:
        files += f", at most {rule.max_prompts} used"
    return f"{files}\n{'':<11}{', '.join(when) or 'never'}; {_sampling(rule, config.rollout.max_response_tokens)}"


def _weights(rollout: RolloutConfig) -> str:
    return "" if rollout.weights == "compute_dtype" else f"{rollout.weights} weights, "


def _sampling(sampling: SamplingConfig, default_tokens: int | None = None) -> str:
    parts = ["greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"]
    if isinstance(sampling, RolloutConfig) and sampling.first_token_temperature is not None:
        cut = f" among {sampling.first_token_top_k}" if sampling.first_token_top_k else ""
        parts.append(f"first token {sampling.first_token_temperature:g}{cut}")
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return f"{', '.join(parts)}, up to {sampling.max_response_tokens or default_tokens} tokens"


def _domains(config: RunConfig) -> str:
    """Describe the parts of a step, and the domains' own filters."""
    lines = []
    for name, domain in config.data.domains.items():
        own = domain.group_filter
        kept = f"; {_groups(own)}" if own is not None and own.strategy != "none" else ""
        lines.append(f"{name} {domain.prompts_per_step} prompts ({', '.join(domain.sources)}){kept}")
    return f"\n{'':<11}".join(lines)


def _groups(chosen: GroupFilterConfig) -> str:
    """Describe the selection of groups for a step."""
    bounds = {
        "standard deviation above": chosen.above_std,
        "mean above": chosen.above_mean,
        "mean below": chosen.below_mean,
    }
    asked = ", ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None) or "a valid reward"
    asked += f", responses below {chosen.below_tokens} tokens" if chosen.below_tokens is not None else ""
    if chosen.strategy == "prefer":
        batches = _count(chosen.oversample, "batch") if chosen.oversample == 1 else f"{chosen.oversample} batches"
        return f"of {batches} of prompts, first those with {chosen.metric} of {asked}, then the others"
    return f"{chosen.strategy} those without {chosen.metric} of {asked}"


def _advantage(config: RunConfig) -> str:
    advantage = config.advantage
    text = advantage.name + (f" of {advantage.path}" if advantage.path else "")
    text += f": {advantage.about.summary.rstrip('.')}" if advantage.about.summary else ""
    numbers = ", ".join(f"{name} {show(value)}" for name, value in advantage.settings.items())
    return f"\n{'':<11}".join(line for part in (text, numbers) for line in textwrap.wrap(part, width=69))


def _drawn(config: RunConfig) -> str:
    """Describe the second draw of a step's responses; "" without one."""
    chosen = config.resampling
    by = {
        "power": f"by |score|^{chosen.exponent:g}",
        "extremes": "from those with the highest and the lowest score",
        "best": "0.4 for the highest score to 0.1 for others",
    }
    return f"again, with replacement, {by[chosen.weights]}" if chosen.weights in by else ""


def _loss(config: RunConfig) -> str:
    loss = config.loss
    name = loss.name + (f" of {loss.path}" if loss.path else "")
    given = {key: value for key, value in loss.settings.items() if value is not None and value is not False}
    settings = [f"{key} {value if isinstance(value, str) else show(value)}" for key, value in given.items()]
    text = f"\n{'':<11}".join(textwrap.wrap(", ".join([name, *settings, loss.aggregation]), width=69))
    correction = loss.rollout_correction
    if correction.use_rollout_logprobs:
        text += f"\n{'':<11}old log-probs are the sampler's"
    if correction.weights != "none":
        low = f"0 below {correction.weight_low:g} and above" if correction.weight_low is not None else "at most"
        text += f"\n{'':<11}x trainer / sampler, per {correction.weights}, {low} {correction.weight_high:g}"
        text += "; corrects for rollout.weights=int8" if config.rollout.weights == "int8" else ""
    if correction.proximal == "loglinear":
        text += f"\n{'':<11}the trainer's log-probs at the step's start interpolated by version"
    if correction.reject:
        text += f"\n{'':<11}without what breaks {', '.join(correction.reject)} ({', '.join(correction.reject_bounds)})"
    if loss.off_policy_limit is not None:
        text += f"\n{'':<11}without tokens of negative advantage above {loss.off_policy_limit:g} nats off policy"
    if loss.high_entropy_share is not None:
        text += f"\n{'':<11}on the {100 * loss.high_entropy_share:g} % of tokens with the highest entropy"
    if loss.sft_coef:
        text += f"\n{'':<11}+ {loss.sft_coef:g} x SFT on responses with a score above 0"
    if loss.router_balance_coef:
        text += f"\n{'':<11}+ {loss.router_balance_coef:g} x balance of experts"
    if loss.entropy_coef:
        text += f"\n{'':<11}- {loss.entropy_coef:g} x entropy"
    if loss.kl_coef:
        reference = config.reference.path or "the starting weights"
        every = config.reference.update_every
        if every is not None:
            moved = every if every == "epoch" else _count(every, "step")
            reference += f", moved {config.reference.update_mix:g} of the way to the policy every {moved}"
        weighted = " x ratio" if loss.kl_importance_weighted else ""
        text += f"\n{'':<11}+ {loss.kl_coef:g} x KL ({loss.kl_estimator}{weighted}) to {reference}"
    return text


def _process_reward(config: RunConfig, batches: BatchPlan) -> str:
    """Describe the process reward model."""
    process = config.reward.process
    assert process is not None
    when = {"before": "before it rewards the step", "after": "while it rewards the step", "never": "never"}[
        process.update
    ]
    start = process.path or "the policy's starting weights"
    size = process_sequences_per_update(config, batches)
    lines = [
        f"{start}; log-ratio to {process.reference_path or start}, x {process.log_ratio_scale:g}"
        + (", normalised over the step" if process.normalize else ""),
        f"updated {when}" + ("" if process.update == "never" else f", {size} sequences per update"),
    ]
    if process_shapes(config) is None:
        lines.append("its memory is not in the estimate below (no config.json to read)")
    if process.update != "never":
        lines.insert(2, optimizer_text(process.optimizer, process.schedule))
    return f"\n{'':<11}".join(lines)


def _critic(config: RunConfig, plan: CriticBatchPlan) -> str:
    critic = config.critic
    start = critic.path or "the policy's starting weights with a new value head"
    clip = f", value_clip {critic.value_clip:g}" if critic.value_clip is not None else ""
    by_tokens = critic.max_tokens_per_micro_batch
    micro = (
        f"up to {by_tokens} tokens" if by_tokens else _count(plan.sequences_per_micro_batch_per_device or 0, "sequence")
    )
    lines = [
        start,
        f"value loss{clip}, {critic.aggregation}",
        optimizer_text(critic.optimizer, critic.schedule),
        f"{_count(plan.updates_per_step, 'update')} per step, of {plan.sequences_per_update} sequences",
        f"{micro} per micro-batch",
    ]
    if plan.warmup_steps:
        lines.append(f"alone in the first {_count(plan.warmup_steps, 'step')}: the policy is not updated there")
    return f"\n{'':<11}".join(lines)


def optimizer_text(optimizer: OptimizerConfig, schedule: ScheduleConfig) -> str:
    warmup = ""
    if schedule.warmup_updates:
        warmup = f" after {schedule.warmup_updates} updates of warm-up"
    elif schedule.warmup_updates is None and schedule.warmup_ratio:
        warmup = f" after {100 * schedule.warmup_ratio:g} % of the updates as warm-up"
    shape = f"{schedule.name} per step" if schedule.moves_every == "step" else schedule.name
    return f"{optimizer.name}, learning rate {optimizer.lr:g}, {shape}{warmup}"


def _step(request: TrainRequest) -> str:
    """Format the batch arithmetic of a step, with the user's key beside each number."""
    plan, key = request.batches, request.loaded.key
    per_pass = plan.updates_per_step // plan.epochs_per_step
    updates = _count(plan.updates_per_step, "update")
    rows = [
        (f"{plan.prompts_per_step} prompts", key("data.prompts_per_step")),
        (f"|  x {plan.samples_per_prompt} samples of each", key("rollout.samples_per_prompt")),
        ("v", ""),
        (f"{plan.sequences_per_step} sequences", ""),
        *_fitted(request),
        (f"|  / {_mini_batch(request)} per mini-batch", key("policy.sequences_per_mini_batch")),
        (f"|  x {_count(plan.epochs_per_step, 'pass', 'passes')}", key("policy.epochs_per_step")),
        ("v", ""),
        (f"{updates}{f', {per_pass} in each pass' if plan.epochs_per_step > 1 else ''}", "(optimizer steps)"),
        *_copies(request),
        *_micro_batches(request),
    ]
    return "\n".join(["One step", *(f"  {number:<30} {key}".rstrip() for number, key in rows)])


def _fitted(request: TrainRequest) -> list[tuple[str, str]]:
    """Describe the copies or the samples left out that make a step divide into updates; nothing where it divides."""
    plan, key = request.batches, request.loaded.key("resampling.fit")
    trained, fit = plan.trained_samples_per_step, request.loaded.config.resampling.fit
    if trained is None or (trained == plan.sequences_per_step and not plan.counts_turns):
        return []
    multiple = samples_divide_by(request.loaded.config, plan)
    if plan.counts_turns:
        return [(f"|  turns, {fit} to {multiple} x n", key), ("v", ""), (f"{trained} samples or more", "")]
    change = trained - plan.sequences_per_step
    said = f"+ {change} copied" if change > 0 else f"- {-change} left out"
    return [(f"|  {said} ({multiple} x {trained // multiple})", key), ("v", ""), (f"{trained} samples", "")]


def _mini_batch(request: TrainRequest) -> str:
    """Format the size of a mini-batch in sequences, with the count of prompts where the user's key counts prompts."""
    plan = request.batches
    counts_prompts = request.loaded.words is not None and plan.sequences_per_update % plan.samples_per_prompt == 0
    prompts = plan.sequences_per_update // plan.samples_per_prompt
    rest = (plan.trained_samples_per_step or plan.sequences_per_step) % plan.sequences_per_update
    size = f"{plan.sequences_per_update}{f', {rest} in the last,' if rest else ''}"
    return f"{f'{prompts} x {plan.samples_per_prompt} = ' if counts_prompts else ''}{size}"


def _copies(request: TrainRequest) -> list[tuple[str, str]]:
    """Describe the split of an update's sequences over several copies of the policy."""
    plan = request.batches
    policy = request.placement.role("policy")
    copies = policy.copies if policy else 1
    if copies == 1:
        return []
    return [
        (f"|  / {copies} copies of the policy", request.loaded.key("placement.devices")),
        ("v", ""),
        (f"{plan.sequences_per_update // copies} sequences per copy, per update", ""),
    ]


def _micro_batches(request: TrainRequest) -> list[tuple[str, str]]:
    plan, key = request.batches, request.loaded.key
    passes = "(forward and backward passes)"
    if plan.gradient_accumulation_steps is None:
        return [
            (f"|  / up to {plan.max_tokens_per_micro_batch} tokens", key("policy.max_tokens_per_micro_batch")),
            ("v", ""),
            ("micro-batches, as they fill", passes),
        ]
    micro_batches = _count(plan.gradient_accumulation_steps, "micro-batch", "micro-batches")
    return [
        (
            f"|  / {plan.sequences_per_micro_batch_per_device} per micro-batch",
            key("policy.sequences_per_micro_batch_per_device"),
        ),
        ("v", ""),
        (f"{micro_batches} per update", passes),
    ]


def _whole_run(request: TrainRequest) -> str:
    plan, run = request.batches, request.loaded.config.run
    if request.loaded.config.validation.only:
        return "Whole run\n  one validation, and no step"
    lines = ["Whole run"]
    if plan.steps_per_epoch is not None:
        lines.append(
            f"  {request.training_prompts} prompts / {plan.prompts_per_step} per step = "
            f"{_count(plan.steps_per_epoch, 'step')} per epoch"
        )
    steps_key, epochs_key = (request.loaded.key(f"run.total_{unit}") for unit in ("steps", "epochs"))
    epochs = _count(run.total_epochs, "epoch")
    if run.total_steps is not None:
        lines.append(f"  {_count(run.total_steps, 'step')}{'':<8}{steps_key}")
        if plan.total_steps is not None and plan.total_steps < run.total_steps:
            lines.append(f"  x {epochs} = {_count(plan.total_steps, 'step')}, which come first{'':<8}{epochs_key}")
        elif run.within_epochs and plan.steps_per_epoch is None:
            lines.append(f"  or {epochs}, whichever come first{'':<8}{epochs_key}")
    elif plan.total_steps is not None:
        lines.append(f"  x {epochs} = {_count(plan.total_steps, 'step')}{'':<8}{epochs_key}")
    else:
        lines.append(f"  {epochs} of the training data, which was not counted (--skip-files)")
    if plan.total_steps is not None and plan.total_updates is not None:
        sequences = plan.total_steps * plan.sequences_per_step
        lines.append(f"  {_count(plan.total_updates, 'update')}, {sequences} sampled sequences")
    return "\n".join(lines)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
