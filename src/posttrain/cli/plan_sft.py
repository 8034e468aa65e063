"""The plan of supervised fine-tuning, with every problem found before torch is loaded."""

from __future__ import annotations

from posttrain.cli.plan_on_files import Counted, FilesRequest, Unit, at_most, checked, json_of, text_of, validation_text
from posttrain.cli.plan_teachers import teachers_text
from posttrain.cli.plan_text import files_text, model_text, optimizer_text
from posttrain.config.sft import SftConfig, SftDataConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import DataError, Problem
from posttrain.plan.checks.own_classes import check_callback
from posttrain.plan.files import check_chat_template, check_model_files, check_run_folders
from posttrain.plan.sft import plan_sft
from posttrain.plan.teacher_files import check_teachers

Request = FilesRequest[SftConfig]


def check_request(loaded: LoadedConfig[SftConfig], *, look_at_files: bool, to_run: bool = False) -> Request:
    """Check the configuration, its files and its sizes; see ``plan_on_files.checked``."""
    if look_at_files:
        from posttrain.data.sft_rows import PROMPT
        from posttrain.data.unread_columns import unread_columns

        loaded = loaded.warned(unread_columns(loaded.config.data, PROMPT))
    return checked(loaded, _look_at_files if look_at_files else None, plan_sft, to_run=to_run)


def _look_at_files(config: SftConfig) -> Counted:
    """Check all files. Rows that a class of the user's reads are not counted."""
    from posttrain.data.check import check_sft_rows
    from posttrain.data.sft_rows import check_sft_files, is_tokenized

    data = config.data
    problems = check_sft_files(data)
    counts: list[int | None] = [None, None]
    if not problems and data.dataset_class_file is None:
        try:
            for index, field in enumerate(("train_files", "validation_files")):
                tokenized = is_tokenized(data, field)
                checked = [check_sft_rows(file, data, tokenized=tokenized) for file in getattr(data, field)]
                counts[index] = sum(rows for rows, _ in checked)
                problems += [problem for _, found in checked for problem in found]
        except DataError as error:
            problems += error.problems
    problems += other_file_problems(config)
    rows, validation_rows = counts
    return problems, at_most(rows, data.max_rows), at_most(validation_rows, config.validation.max_rows)


def other_file_problems(config: SftConfig) -> list[Problem]:
    """Check the files besides the data, which may not be here yet."""
    problems = [
        *check_model_files(config.model),
        *check_teachers(config),
        *check_run_folders(config),
        *check_callback(config),
    ]
    data = config.data
    all_tokens = data.train_tokenized and (data.validation_tokenized or not data.validation_files)
    templated = data.dataset_class_file is None and not all_tokens
    return problems + (check_chat_template(config.model) if templated else [])


def plan_text(request: Request) -> str:
    """Format the plan: data and model, and what ``plan_on_files.text_of`` adds."""
    config = request.loaded.config
    data = config.data
    unit = Unit(name="row", per_step=request.batches.sequences_per_step)
    rows = [
        ("run", f"{config.run.name}, into {config.folder}, seed {config.run.seed}"),
        ("model", model_text(config.model)),
        *([("adapter", f"rank {config.policy.lora.rank}")] if config.policy.lora else []),
        ("data", f"{files_text(data.train_files)}{unit.counted(request.rows)}"),
        ("", f"{_trained_tokens(data)}, up to {data.max_tokens} tokens"),
        ("validation", validation_text(request, unit)),
        *([("teachers", teachers_text(config))] if config.distillation.used else []),
        ("optimizer", optimizer_text(config.policy.optimizer, config.policy.schedule)),
    ]
    return text_of(request, rows, unit, in_a_step=f"{unit.per_step} sequences")


def plan_json(request: Request) -> str:
    """Return the plan as JSON; see ``plan_on_files.json_of``."""
    return json_of(request, {})


def _trained_tokens(data: SftDataConfig) -> str:
    if data.dataset_class_file is not None:
        return f"what {data.dataset_class_name} of {data.dataset_class_file} marks"
    if data.train_tokenized:
        return "what loss_mask marks"
    return "the last answer of a row" if data.train_on == "last_turn" else "every answer of a row"
