"""The plan of a tuning run, with every problem found before torch is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from posttrain.cli.plan_devices import devices_text, memory_text, traffic_text
from posttrain.cli.plan_plain import closing, document
from posttrain.cli.plan_text import files_text, model_text, optimizer_text
from posttrain.config.roles import reference_is_policy
from posttrain.config.tune import TuneConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import Problem, RequestError
from posttrain.plan.estimate import estimate_sft
from posttrain.plan.files import check_chat_template, check_model_files, check_run_folders
from posttrain.plan.heads import head_problems
from posttrain.plan.model_shape import read_shape
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.step_traffic import sft_traffic
from posttrain.plan.tune import plan_tune
from posttrain.records.batch_plans import SftBatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    loaded: LoadedConfig[TuneConfig]
    batches: SftBatchPlan
    placement: PlacementPlan
    rows: int | None  # of the training files, as the method reads them; None: not counted
    validation_rows: int | None


def check_request(loaded: LoadedConfig[TuneConfig], *, look_at_files: bool, to_run: bool = False) -> TuneRequest:
    """Check the configuration, its files and its sizes.

    Args: ``to_run`` also rejects what is planned but not built yet.
    Raises: RequestError with all problems.
    """
    problems = [*loaded.problems, *(loaded.unsupported if to_run else ())]
    rows = validation_rows = None
    if look_at_files and loaded.config.method.is_known:
        found, rows, validation_rows = _look_at_files(loaded.config)
        problems += loaded.further(found)
    batches = None
    placement: PlacementPlan | None = None
    if not loaded.problems:
        placement, misplaced = place(loaded.config)
        batches, misfits = plan_tune(loaded.config, rows) if not misplaced else (None, [])
        if look_at_files and placement is not None:
            misfits += head_problems(loaded.config, placement)
        problems += loaded.locate([*misplaced, *misfits])
    if batches is None or placement is None or problems:
        raise RequestError(problems)
    return TuneRequest(loaded=loaded, batches=batches, placement=placement, rows=rows, validation_rows=validation_rows)


def _look_at_files(config: TuneConfig) -> tuple[list[Problem], int | None, int | None]:
    """Check all files. Returns: problems, and the rows of training and validation files; None where a file is wrong."""
    from posttrain.data.preference_rows import check_preference_files

    problems, rows, validation_rows = check_preference_files(config)
    counts = (
        (None, None)
        if problems
        else (
            _at_most(rows, config.data.max_rows),
            _at_most(validation_rows, config.validation.max_rows),
        )
    )
    problems += [*check_model_files(config.model), *check_run_folders(config), *check_chat_template(config.model)]
    return problems, *counts


def _at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)


def plan_text(request: TuneRequest) -> str:
    """Format the plan: method, data and model, one step, the devices, the whole run, and remarks."""
    config = request.loaded.config
    rows = [
        ("run", f"{config.run.name}, into {config.folder}, seed {config.run.seed}"),
        ("method", _method(config)),
        ("model", model_text(config.model)),
        *([("adapter", f"rank {config.policy.lora.rank}")] if config.policy.lora else []),
        *([("reference", _reference(config))] if config.method.needs_reference else []),
        ("data", f"{files_text(config.data.train_files)}{_count(config, request.rows)}"),
        ("", f"sequences of up to {config.data.max_tokens} tokens, prompt and completion"),
        ("validation", _validation(request)),
        ("optimizer", optimizer_text(config.policy.optimizer, config.policy.schedule)),
    ]
    what = "\n".join(f"{name:<11}{text}" for name, text in rows)
    memory = estimate_sft(config, request.batches, request.placement)
    parts = [
        what,
        _step(request),
        devices_text(request.placement),
        memory_text(memory, request.placement, config.model.path),
        *_traffic(request),
        _whole_run(request),
        *closing(request.loaded),
    ]
    if config.data.overlong == "filter" and request.rows is not None:
        parts.append("Rows that the overlong filter drops are still counted here: they are known once tokenized.")
    return "\n\n".join(parts)


def plan_json(request: TuneRequest) -> str:
    """Return the plan as JSON (plan_plain.document); ``derived`` holds the sizes and the placement."""
    derived = {
        "world_size": request.batches.devices,
        **asdict(request.batches),
        "rows_per_step": request.loaded.config.rows_per_step,
        "placement": asdict(request.placement),
    }
    return json.dumps(document(request.loaded, derived), indent=2)


def _method(config: TuneConfig) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in config.method.settings.items())
    return config.method.name + (f" ({settings})" if settings else "")


def _reference(config: TuneConfig) -> str:
    if config.data.reference_columns is not None:
        return f"its log-probs are in {' and '.join(config.data.reference_columns)}"
    if config.reference.precompute:
        return f"{config.reference.path or config.model.path}, which scores all rows before the run"
    if reference_is_policy(config):
        return "the policy without its adapter"
    return config.reference.path or f"{config.model.path}, as it starts"


def _unit(config: TuneConfig) -> str:
    return "pair" if config.method.paired else "completion"


def _count(config: TuneConfig, rows: int | None) -> str:
    return "" if rows is None else f": {rows} {_unit(config)}{'s' * (rows != 1)}"


def _validation(request: TuneRequest) -> str:
    config = request.loaded.config
    if not config.data.validation_files:
        return "none"
    rule = config.validation
    when = [
        *(["before training"] if rule.before_training else []),
        *([f"every {rule.every_steps} steps"] if rule.every_steps else []),
        *(["after each epoch"] if rule.each_epoch else []),
        *(["after training"] if rule.after_training else []),
    ]
    files = f"{files_text(config.data.validation_files)}{_count(config, request.validation_rows)}"
    return f"{files}\n{'':<11}{', '.join(when) or 'never'}"


def _step(request: TuneRequest) -> str:
    plan, key, config = request.batches, request.loaded.key, request.loaded.config
    pairs = f"{config.rows_per_step} pairs = " if config.method.paired else ""
    lines = [(f"{pairs}{plan.sequences_per_step} sequences, 1 update", key("data.sequences_per_step"))]
    policy = request.placement.role("policy")
    assert policy is not None, "every run has a policy"
    per_copy = f" on each of {policy.copies} copies" if policy.copies > 1 else ""
    if plan.gradient_accumulation_steps is None:
        per_device = " per device" if plan.devices > 1 else ""
        field = "policy.max_tokens_per_micro_batch"
        lines.append((f"micro-batches of up to {plan.max_tokens_per_micro_batch} tokens{per_device}", key(field)))
    else:
        many = f"{plan.gradient_accumulation_steps} of up to {plan.sequences_per_micro_batch_per_device} sequences"
        lines.append((f"micro-batches: {many}{per_copy}", key("policy.sequences_per_micro_batch_per_device")))
    return "\n".join(["One step", *(f"  {number:<42} {name}" for number, name in lines)])


def _traffic(request: TuneRequest) -> list[str]:
    config = request.loaded.config
    shape = read_shape(config.model.path) if request.placement.devices > 1 else None
    return [traffic_text(sft_traffic(config, request.batches, request.placement, shape))] if shape else []


def _whole_run(request: TuneRequest) -> str:
    plan, config = request.batches, request.loaded.config
    lines = ["Whole run"]
    if plan.steps_per_epoch is not None:
        left = (request.rows or 0) % config.rows_per_step
        unit = f"{_unit(config)}s"
        lines.append(
            f"  {request.rows} {unit} / {config.rows_per_step} per step = {plan.steps_per_epoch} steps per epoch"
            + (f", {left} {unit} left out of each" if left else "")
        )
    if plan.total_steps is not None:
        lines.append(f"  {plan.total_steps} steps")
        if plan.schedule_updates not in (None, plan.total_steps):
            lines.append(f"  the learning rate is that of a run of {plan.schedule_updates} steps")
    else:
        lines.append(f"  {config.run.total_epochs} epochs of the training data, which was not counted")
    return "\n".join(lines)
