"""The plan of a tuning run, with every problem found before torch is loaded."""

from __future__ import annotations

from posttrain.cli.plan_on_files import Counted, FilesRequest, Unit, at_most, checked, json_of, text_of, validation_text
from posttrain.cli.plan_text import files_text, model_text, optimizer_text
from posttrain.config.roles import reference_is_policy
from posttrain.config.tune import TuneConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import Problem
from posttrain.plan.checks.own_classes import check_callback
from posttrain.plan.checks.tune import image_problems
from posttrain.plan.files import check_chat_template, check_model_files, check_reads_images, check_run_folders
from posttrain.plan.model_files import check_model
from posttrain.plan.reward_model_files import head_shape_problems
from posttrain.plan.tune import plan_tune

Request = FilesRequest[TuneConfig]


def check_request(loaded: LoadedConfig[TuneConfig], *, look_at_files: bool, to_run: bool = False) -> Request:
    """Check the configuration, its files and its sizes; see ``plan_on_files.checked``. The files of an unknown method are not
    read, because its columns are unknown, too."""
    from posttrain.data.preference_rows import PROMPT, prompts_in_texts
    from posttrain.data.unread_columns import unread_columns

    look = _look_at_files if look_at_files and loaded.config.method.is_known else None
    if look is not None:
        loaded = loaded.warned([*unread_columns(loaded.config.data, PROMPT), *prompts_in_texts(loaded.config)])
    return checked(loaded, look, plan_tune, to_run=to_run)


def _look_at_files(config: TuneConfig) -> Counted:
    """Check all files. Nothing is counted where one of them is wrong, or a class of the user's reads them."""
    from posttrain.data.images import CHOOSE_A_VISION_MODEL, VISION_MODELS
    from posttrain.data.preference_images import first_with_images
    from posttrain.data.preference_rows import check_preference_files

    problems, rows, validation_rows = check_preference_files(config)
    own = config.data.dataset_class_file is not None
    counted = not problems and not own
    if not own and first_with_images(config) is not None:
        problems += check_reads_images(config.model, VISION_MODELS, CHOOSE_A_VISION_MODEL)
        problems += image_problems(config)
    problems += other_file_problems(config)
    if not counted:
        return problems, None, None
    return problems, at_most(rows, config.data.max_rows), at_most(validation_rows, config.validation.max_rows)


def other_file_problems(config: TuneConfig) -> list[Problem]:
    """Check the files besides the data, which may not be here yet."""
    from posttrain.data.sft_rows import own_class_file_problems

    problems = [
        *check_model_files(config.model),
        *check_run_folders(config),
        *check_callback(config),
        *own_class_file_problems(config.data),
    ]
    problems += [] if config.data.dataset_class_file is not None else check_chat_template(config.model)
    problems += head_shape_problems(config.model.path, "model.path") if config.method.scored else []
    if config.runs_reference and config.reference.path is not None:
        problems += check_model(config.reference.path, "reference.path", tokenizer=False)
    return problems


def plan_text(request: Request) -> str:
    """Format the plan: method, data and model, and what ``plan_on_files.text_of`` adds."""
    config = request.loaded.config
    unit = Unit(name="pair" if config.method.paired else "completion", per_step=config.rows_per_step)
    rows = [
        ("run", f"{config.run.name}, into {config.folder}, seed {config.run.seed}"),
        ("method", _method(config)),
        ("model", model_text(config.model)),
        *([("adapter", f"rank {config.policy.lora.rank}")] if config.policy.lora else []),
        *([("reference", _reference(config))] if config.method.needs_reference else []),
        ("data", f"{files_text(config.data.train_files)}{unit.counted(request.rows)}"),
        ("", f"sequences of up to {config.data.max_tokens} tokens, prompt and completion"),
        ("validation", validation_text(request, unit)),
        ("optimizer", optimizer_text(config.policy.optimizer, config.policy.schedule)),
    ]
    pairs = f"{unit.many(unit.per_step)} = " if config.method.paired else ""
    return text_of(request, rows, unit, in_a_step=f"{pairs}{request.batches.sequences_per_step} sequences")


def plan_json(request: Request) -> str:
    """Return the plan as JSON; see ``plan_on_files.json_of``."""
    return json_of(request, {"rows_per_step": request.loaded.config.rows_per_step})


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
