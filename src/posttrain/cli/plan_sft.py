"""The plan of supervised fine-tuning, with every problem found before torch is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from posttrain.cli.plan_devices import devices_text, memory_text, traffic_text
from posttrain.cli.plan_plain import closing, document
from posttrain.cli.plan_teachers import teachers_text
from posttrain.cli.plan_text import files_text, model_text, optimizer_text
from posttrain.config.sft import SftConfig, SftDataConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import DataError, Problem, RequestError
from posttrain.plan.estimate import estimate_sft
from posttrain.plan.files import check_chat_template, check_model_files, check_run_folders
from posttrain.plan.heads import head_problems
from posttrain.plan.model_shape import read_shape
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.sft import plan_sft
from posttrain.plan.step_traffic import sft_traffic
from posttrain.plan.teacher_files import check_teachers
from posttrain.records.batch_plans import SftBatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRequest:
    loaded: LoadedConfig[SftConfig]
    batches: SftBatchPlan
    placement: PlacementPlan
    rows: int | None  # of the training files; None: not counted
    validation_rows: int | None


def check_request(loaded: LoadedConfig[SftConfig], *, look_at_files: bool, to_run: bool = False) -> SftRequest:
    """Check the configuration, its files and its sizes.

    Args: ``to_run`` also rejects what is planned but not built yet.
    Raises: RequestError with all problems.
    """
    problems = [*loaded.problems, *(loaded.unsupported if to_run else ())]
    rows = validation_rows = None
    if look_at_files:
        found, rows, validation_rows = _look_at_files(loaded.config)
        problems += loaded.further(found)
    batches = None
    placement: PlacementPlan | None = None
    if not loaded.problems:
        placement, misplaced = place(loaded.config)
        batches, misfits = plan_sft(loaded.config, rows) if not misplaced else (None, [])
        if look_at_files and placement is not None:
            misfits += head_problems(loaded.config, placement)
        problems += loaded.locate([*misplaced, *misfits])
    if batches is None or placement is None or problems:
        raise RequestError(problems)
    return SftRequest(loaded=loaded, batches=batches, placement=placement, rows=rows, validation_rows=validation_rows)


def _look_at_files(config: SftConfig) -> tuple[list[Problem], int | None, int | None]:
    """Check all files. Returns: problems, and the rows of training and validation files; None for files that a user's class
    reads."""
    from posttrain.data.check import check_sft_rows
    from posttrain.data.sft_rows import check_sft_files

    data = config.data
    problems = check_sft_files(data)
    counts: list[int | None] = [None, None]
    if not problems and data.dataset_class_file is None:
        try:
            for index, files in enumerate((data.train_files, data.validation_files)):
                checked = [check_sft_rows(file, data) for file in files]
                counts[index] = sum(rows for rows, _ in checked)
                problems += [problem for _, found in checked for problem in found]
        except DataError as error:
            problems += error.problems
    problems += [*check_model_files(config.model), *check_teachers(config), *check_run_folders(config)]
    if data.dataset_class_file is None:
        problems += check_chat_template(config.model)
    rows, validation_rows = counts
    return problems, _at_most(rows, data.max_rows), _at_most(validation_rows, config.validation.max_rows)


def _at_most(count: int | None, limit: int | None) -> int | None:
    return count if count is None or limit is None else min(count, limit)


def plan_text(request: SftRequest) -> str:
    """Format the plan: data and model, one step, the devices, the whole run, and remarks."""
    config = request.loaded.config
    data = config.data
    rows = [
        ("run", f"{config.run.name}, into {config.folder}, seed {config.run.seed}"),
        ("model", model_text(config.model)),
        *([("adapter", f"rank {config.policy.lora.rank}")] if config.policy.lora else []),
        ("data", f"{files_text(data.train_files)}{_count(request.rows)}"),
        ("", f"{_trained_tokens(data)}, up to {data.max_tokens} tokens"),
        ("validation", _validation(request)),
        *([("teachers", teachers_text(config))] if config.distillation.used else []),
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
    if data.overlong == "filter" and request.rows is not None:
        parts.append("Rows that the overlong filter drops are still counted here: they are known once tokenized.")
    return "\n\n".join(parts)


def plan_json(request: SftRequest) -> str:
    """Return the plan as JSON (plan_plain.document); ``derived`` holds the sizes and the placement."""
    derived = {
        "world_size": request.batches.devices,
        **asdict(request.batches),
        "placement": asdict(request.placement),
    }
    return json.dumps(document(request.loaded, derived), indent=2)


def _trained_tokens(data: SftDataConfig) -> str:
    if data.dataset_class_file is not None:
        return f"what {data.dataset_class_name} of {data.dataset_class_file} marks"
    return "the last answer of a row" if data.train_on == "last_turn" else "every answer of a row"


def _validation(request: SftRequest) -> str:
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
    files = f"{files_text(config.data.validation_files)}{_count(request.validation_rows)}"
    return f"{files}\n{'':<11}{', '.join(when) or 'never'}"


def _count(rows: int | None) -> str:
    return "" if rows is None else f": {rows} rows"


def _step(request: SftRequest) -> str:
    plan, key = request.batches, request.loaded.key
    lines = [(f"{plan.sequences_per_step} sequences, 1 update", key("data.sequences_per_step"))]
    policy = request.placement.role("policy")
    assert policy is not None, "every run has a policy"
    per_copy = f" on each of {policy.copies} copies" if policy.copies > 1 else ""
    per_device = " per device" if plan.devices > 1 else ""
    if plan.gradient_accumulation_steps is None:
        lines.append(
            (
                f"micro-batches of up to {plan.max_tokens_per_micro_batch} tokens{per_device}",
                key("policy.max_tokens_per_micro_batch"),
            )
        )
    else:
        micro = "policy.sequences_per_micro_batch_per_device"
        many = f"{plan.gradient_accumulation_steps} of up to {plan.sequences_per_micro_batch_per_device} sequences"
        lines.append((f"micro-batches: {many}{per_copy}", key(micro)))
    return "\n".join(["One step", *(f"  {number:<42} {name}" for number, name in lines)])


def _traffic(request: SftRequest) -> list[str]:
    config = request.loaded.config
    shape = read_shape(config.model.path) if request.placement.devices > 1 else None
    return [traffic_text(sft_traffic(config, request.batches, request.placement, shape))] if shape else []


def _whole_run(request: SftRequest) -> str:
    plan, run = request.batches, request.loaded.config.run
    lines = ["Whole run"]
    if plan.steps_per_epoch is not None:
        left = (request.rows or 0) % plan.sequences_per_step
        lines.append(
            f"  {request.rows} rows / {plan.sequences_per_step} per step = {plan.steps_per_epoch} steps per epoch"
            + (f", {left} rows left out of each" if left else "")
        )
    if plan.total_steps is not None:
        lines.append(f"  {plan.total_steps} steps")
        if plan.schedule_updates not in (None, plan.total_steps):
            lines.append(f"  the learning rate is that of a run of {plan.schedule_updates} steps")
    else:
        lines.append(f"  {run.total_epochs} epochs of the training data, which was not counted")
    return "\n".join(lines)
