"""A request in words, for a person, and as JSON, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from posttrain.cli.request import Request
from posttrain.config import RunConfig
from posttrain.config.rollout import SamplingConfig
from posttrain.placement.files import is_hub_id
from posttrain.records.plans import BatchPlan
from posttrain.registry import POLICY_LOSSES


def plan_json(request: Request) -> str:
    """{dialect, entry, config, derived, ignored, unsupported, warnings}; ``derived`` holds the batch plan."""
    derived = {
        "world_size": request.batches.devices,
        **asdict(request.batches),
        "max_tokens_per_micro_batch": None,  # micro-batches are cut by count
    }
    document = {
        "dialect": request.loaded.dialect,
        "entry": "train",
        "config": request.loaded.config.model_dump(mode="json"),
        "derived": derived,
        "ignored": [],  # a native configuration has no key without a meaning
        "unsupported": [],
        "warnings": list(request.loaded.warnings),
    }
    return json.dumps(document, indent=2)


def plan_text(request: Request) -> str:
    """The plan in three parts (what, one step, the whole run) and the warnings."""
    config = request.loaded.config
    parts = [_what(request), _step(request.batches), _whole_run(request)]
    if request.loaded.warnings:
        parts.append("\n".join(f"warning: {warning}" for warning in request.loaded.warnings))
    if config.data.overlong_prompts == "filter" and request.training_prompts is not None:
        parts.append("Prompts that the overlong filter drops are still counted here: they are known once tokenized.")
    return "\n\n".join(parts)


def _what(request: Request) -> str:
    config = request.loaded.config
    rows = [
        ("run", f"{config.run.name}, into {config.folder}, seed {config.run.seed}"),
        ("model", _model(config)),
        ("data", f"{_files(config.data.train_files)}{_prompts(request.training_prompts)}"),
        ("validation", _validation(request)),
        ("rollout", f"{config.rollout.engine}, {_sampling(config.rollout)}"),
        ("reward", _reward(config)),
        ("advantage", _advantage(config)),
        ("loss", _loss(config)),
        ("optimizer", _optimizer(config)),
        ("device", config.placement.device),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in rows)


def _model(config: RunConfig) -> str:
    kind = "hub id; no such folder here" if is_hub_id(config.model.path) else "folder"
    return f"{config.model.path} ({kind})\n{'':<11}float32 weights, {config.model.compute_dtype} compute"


def _files(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{len(files)} files, {files[0]} first"


def _prompts(count: int | None) -> str:
    return "" if count is None else f": {count} prompts"


def _validation(request: Request) -> str:
    config = request.loaded.config
    if not config.data.validation_files:
        return "none"
    rule = config.validation
    when = [
        *(["before training"] if rule.before_training else []),
        *([f"every {rule.every_steps} steps"] if rule.every_steps else []),
        *(["after training"] if rule.after_training else []),
    ]
    files = f"{_files(config.data.validation_files)}{_prompts(request.validation_prompts)}"
    if rule.max_prompts is not None:
        files += f", at most {rule.max_prompts} used"
    return f"{files}\n{'':<11}{', '.join(when) or 'never'}; {_sampling(rule, config.rollout.max_response_tokens)}"


def _sampling(sampling: SamplingConfig, default_tokens: int | None = None) -> str:
    parts = ["greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return f"{', '.join(parts)}, up to {sampling.max_response_tokens or default_tokens} tokens"


def _reward(config: RunConfig) -> str:
    terms = [
        (f"{term.weight:g} x " if term.weight != 1 else "") + (f"{term.name} ({term.path})" if term.path else term.name)
        for term in config.reward.terms
    ]
    return " + ".join(terms)


def _advantage(config: RunConfig) -> str:
    advantage = config.advantage
    if advantage.name != "grpo":
        return advantage.name
    return f"grpo: reward minus its group's mean{', over its standard deviation' if advantage.normalize_by_std else ''}"


def _loss(config: RunConfig) -> str:
    loss = config.loss
    settings = [name for name in POLICY_LOSSES.settings(loss.name) if getattr(loss, name, None) is not None]
    text = ", ".join([loss.name, *(f"{name} {getattr(loss, name):g}" for name in settings), loss.aggregation])
    if loss.entropy_coef:
        text += f"\n{'':<11}- {loss.entropy_coef:g} x entropy"
    if loss.kl_coef:
        reference = config.reference.path or "the starting weights"
        text += f"\n{'':<11}+ {loss.kl_coef:g} x KL ({loss.kl_estimator}) to {reference}"
    return text


def _optimizer(config: RunConfig) -> str:
    optimizer, schedule = config.policy.optimizer, config.policy.schedule
    warmup = ""
    if schedule.warmup_updates:
        warmup = f" after {schedule.warmup_updates} updates of warm-up"
    elif schedule.warmup_updates is None and schedule.warmup_ratio:
        warmup = f" after {100 * schedule.warmup_ratio:g} % of the updates as warm-up"
    return f"{optimizer.name}, learning rate {optimizer.lr:g}, {schedule.name}{warmup}"


def _step(plan: BatchPlan) -> str:
    """The way of a step's sequences, with the key that decides each number beside it."""
    per_pass = plan.updates_per_step // plan.epochs_per_step
    updates = _count(plan.updates_per_step, "update")
    rows = [
        (f"{plan.prompts_per_step} prompts", "data.prompts_per_step"),
        (f"|  x {plan.samples_per_prompt} samples of each", "rollout.samples_per_prompt"),
        ("v", ""),
        (f"{plan.sequences_per_step} sequences", ""),
        (f"|  / {plan.sequences_per_update} per mini-batch", "policy.sequences_per_mini_batch"),
        (f"|  x {_count(plan.epochs_per_step, 'pass', 'passes')}", "policy.epochs_per_step"),
        ("v", ""),
        (f"{updates}{f', {per_pass} in each pass' if plan.epochs_per_step > 1 else ''}", "(optimizer steps)"),
        (
            f"|  / {plan.sequences_per_micro_batch_per_device} per micro-batch",
            "policy.sequences_per_micro_batch_per_device",
        ),
        ("v", ""),
        (
            f"{_count(plan.gradient_accumulation_steps, 'micro-batch', 'micro-batches')} per update",
            "(forward and backward passes)",
        ),
    ]
    return "\n".join(["One step", *(f"  {number:<31}{key}".rstrip() for number, key in rows)])


def _whole_run(request: Request) -> str:
    plan, run = request.batches, request.loaded.config.run
    lines = ["Whole run"]
    if plan.steps_per_epoch is not None:
        lines.append(
            f"  {request.training_prompts} prompts / {plan.prompts_per_step} per step = "
            f"{_count(plan.steps_per_epoch, 'step')} per epoch"
        )
    if run.total_steps is not None:
        lines.append(f"  {_count(run.total_steps, 'step')}{'':<8}run.total_steps")
    elif plan.total_steps is not None:
        lines.append(
            f"  x {_count(run.total_epochs, 'epoch')} = {_count(plan.total_steps, 'step')}{'':<8}run.total_epochs"
        )
    else:
        lines.append(
            f"  {_count(run.total_epochs, 'epoch')} of the training data, which was not counted (--skip-files)"
        )
    if plan.total_steps is not None and plan.total_updates is not None:
        sequences = plan.total_steps * plan.sequences_per_step
        lines.append(f"  {_count(plan.total_updates, 'update')}, {sequences} sampled sequences")
    return "\n".join(lines)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
