"""Shared parts of the plans of ``sft`` and ``tune``: runs on a file of rows, in which a step is one update."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from posttrain.cli.plan_devices import devices_text, memory_text, traffic_text
from posttrain.cli.plan_plain import closing, document
from posttrain.cli.plan_text import files_text
from posttrain.config.sft import SftConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import Problem, RequestError
from posttrain.plan.estimate import estimate_sft
from posttrain.plan.heads import head_problems
from posttrain.plan.model_shape import read_shape
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.step_traffic import sft_traffic
from posttrain.records.batch_plans import SftBatchPlan

C = TypeVar("C", bound=SftConfig)
Counted = tuple[
    list[Problem], int | None, int | None
]  # problems; rows of training and validation files, None: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesRequest(Generic[C]):
    """A request without problems, and its sizes."""

    loaded: LoadedConfig[C]
    batches: SftBatchPlan
    placement: PlacementPlan
    rows: int | None  # of the training files, as the run reads them; None: not counted
    validation_rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The rows of a file, in the words of a plan."""

    name: str  # of one: row, pair
    per_step: int

    def many(self, count: int) -> str:
        return f"{count} {self.name}{'s' * (count != 1)}"

    def counted(self, count: int | None) -> str:
        """The text behind the files of so many rows; None: they were not counted."""
        return "" if count is None else f": {self.many(count)}"


def checked(
    loaded: LoadedConfig[C],
    look: Callable[[C], Counted] | None,
    plan: Callable[[C, int | None], tuple[SftBatchPlan | None, list[Problem]]],
    *,
    to_run: bool,
) -> FilesRequest[C]:
    """Check the configuration, its files and its sizes.

    Args: ``look`` at the files, or None; ``to_run`` also rejects what is planned but not built yet.
    Raises: RequestError with all problems.
    """
    problems = [*loaded.problems, *(loaded.unsupported if to_run else ())]
    rows = validation_rows = None
    if look is not None:
        found, rows, validation_rows = look(loaded.config)
        problems += loaded.further(found)
    batches = None
    placement: PlacementPlan | None = None
    if not loaded.problems:
        placement, misplaced = place(loaded.config)
        batches, misfits = plan(loaded.config, rows) if not misplaced else (None, [])
        if look is not None and placement is not None:
            misfits += head_problems(loaded.config, placement)
        problems += loaded.locate([*misplaced, *misfits])
    if batches is None or placement is None or problems:
        raise RequestError(problems)
    return FilesRequest(loaded=loaded, batches=batches, placement=placement, rows=rows, validation_rows=validation_rows)


def at_most(count: int | None, limit: int | None) -> int | None:
    """The rows of a file that a run reads."""
    return count if count is None or limit is None else min(count, limit)


def text_of(request: FilesRequest[C], rows: Sequence[tuple[str, str]], unit: Unit, *, in_a_step: str) -> str:
    """Format the plan: its own ``rows``, one step, the devices, the whole run, and remarks."""
    config = request.loaded.config
    memory = estimate_sft(config, request.batches, request.placement)
    parts = [
        "\n".join(f"{name:<11}{text}" for name, text in rows),
        _step(request, in_a_step),
        devices_text(request.placement),
        memory_text(memory, request.placement, config.model.path),
        *_traffic(request),
        _whole_run(request, unit),
        *closing(request.loaded),
    ]
    if config.data.overlong == "filter" and request.rows is not None:
        parts.append("Rows that the overlong filter drops are still counted here: they are known once tokenized.")
    return "\n\n".join(parts)


def json_of(request: FilesRequest[C], more: Mapping[str, Any]) -> str:
    """Return the plan as JSON (plan_plain.document); ``derived`` holds the sizes, ``more`` and the placement."""
    derived = {
        "world_size": request.batches.devices,
        **asdict(request.batches),
        **more,
        "placement": asdict(request.placement),
    }
    return json.dumps(document(request.loaded, derived), indent=2)


def validation_text(request: FilesRequest[C], unit: Unit) -> str:
    """Format the validation files, and when they are read."""
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
    files = f"{files_text(config.data.validation_files)}{unit.counted(request.validation_rows)}"
    return f"{files}\n{'':<11}{', '.join(when) or 'never'}"


def _step(request: FilesRequest[C], in_a_step: str) -> str:
    plan, key = request.batches, request.loaded.key
    lines = [(f"{in_a_step}, 1 update", key("data.sequences_per_step"))]
    policy = request.placement.role("policy")
    assert policy is not None, "every run has a policy"
    if plan.gradient_accumulation_steps is None:
        per_device = " per device" if plan.devices > 1 else ""
        tokens = f"micro-batches of up to {plan.max_tokens_per_micro_batch} tokens{per_device}"
        lines.append((tokens, key("policy.max_tokens_per_micro_batch")))
    else:
        per_copy = f" on each of {policy.copies} copies" if policy.copies > 1 else ""
        many = f"{plan.gradient_accumulation_steps} of up to {plan.sequences_per_micro_batch_per_device} sequences"
        lines.append((f"micro-batches: {many}{per_copy}", key("policy.sequences_per_micro_batch_per_device")))
    return "\n".join(["One step", *(f"  {number:<42} {name}" for number, name in lines)])


def _traffic(request: FilesRequest[C]) -> list[str]:
    config = request.loaded.config
    shape = read_shape(config.model.path) if request.placement.devices > 1 else None
    return [traffic_text(sft_traffic(config, request.batches, request.placement, shape))] if shape else []


def _whole_run(request: FilesRequest[C], unit: Unit) -> str:
    plan = request.batches
    lines = ["Whole run"]
    if plan.steps_per_epoch is not None:
        rows = request.rows or 0
        left = rows % unit.per_step
        lines.append(
            f"  {unit.many(rows)} / {unit.per_step} per step = {plan.steps_per_epoch} steps per epoch"
            + (f", {unit.many(left)} left out of each" if left else "")
        )
    if plan.total_steps is not None:
        lines.append(f"  {plan.total_steps} steps")
        run = request.loaded.config.run
        if run.total_steps is not None and plan.total_steps < run.total_steps:
            lines[-1] += f" = {run.total_epochs} epochs, which come before {run.total_steps} steps"
        if plan.schedule_updates not in (None, plan.total_steps):
            lines.append(f"  the learning rate is that of a run of {plan.schedule_updates} steps")
    else:
        lines.append(f"  {request.loaded.config.run.total_epochs} epochs of the training data, which was not counted")
    return "\n".join(lines)
