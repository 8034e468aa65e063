"""The plan of a generation, with every problem found before torch is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass

from posttrain.cli.plan_plain import closing, document
from posttrain.config.generate import GenerateConfig
from posttrain.config.roles import shares_weights
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import DataError, Problem, RequestError
from posttrain.plan.files import check_chat_template, check_model_files, check_output_file


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    loaded: LoadedConfig[GenerateConfig]
    rows: int | None  # of all files; None: not counted


def check_request(
    loaded: LoadedConfig[GenerateConfig], *, look_at_files: bool, to_run: bool = False
) -> GenerateRequest:
    """Check the configuration, its files and the model's files.

    Args: ``to_run`` also rejects what is planned but not built yet.
    Raises: RequestError with all problems.
    """
    problems = [*loaded.problems, *(loaded.unsupported if to_run else ())]
    rows = None
    if look_at_files:
        found, rows = _look_at_files(loaded.config)
        problems += loaded.further(found)
    if problems:
        raise RequestError(problems)
    return GenerateRequest(loaded=loaded, rows=rows)


def _look_at_files(config: GenerateConfig) -> tuple[list[Problem], int | None]:
    from posttrain.data.generation import check_generation_files
    from posttrain.data.record_files import count_rows

    problems = check_generation_files(config.data, config.output.column)
    rows = None
    if not problems:
        try:
            rows = sum(map(count_rows, config.data.files))
        except DataError as error:
            problems += error.problems
    if rows is not None and config.data.max_prompts is not None:
        rows = min(rows, config.data.max_prompts)
    return problems + other_file_problems(config), rows


def other_file_problems(config: GenerateConfig) -> list[Problem]:
    """Check the files besides the data, which may not be here yet."""
    problems = check_model_files(config.model)
    problems += check_chat_template(config.model) if config.data.templated_prompts != "raw" else []
    return problems + check_output_file(config.output.file, "output.file")


def plan_text(request: GenerateRequest) -> str:
    config, rows = request.loaded.config, request.rows
    sampling = config.rollout
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    how += f", top-k {sampling.top_k}" if sampling.top_k else ""
    how += f", top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    how += f", min-p {sampling.min_p:g}" if sampling.min_p else ""
    count = "" if rows is None else f": {rows} rows, {rows * sampling.samples_per_prompt} responses"
    lines = [
        f"model      {config.model.path}, {config.model.compute_dtype}",
        f"prompts    {', '.join(config.data.files)}{count}",
        f"           up to {config.data.max_prompt_tokens} tokens; longer ones: {config.data.overlong_prompts}",
        f"sampling   {sampling.engine}, {sampling.samples_per_prompt} per prompt, {how}, up to "
        f"{sampling.max_response_tokens} tokens, seed {config.run.seed}",
        f"output     {config.output.file}, column {config.output.column}, saved every {config.output.rows_per_part} rows",
    ]
    if config.placement.devices > 1 and not sampling.endpoints:
        lines.insert(4, f"devices    {_devices(config)}")
    return "\n\n".join(["\n".join(lines), *closing(request.loaded)])


def _devices(config: GenerateConfig) -> str:
    place, sampling = config.placement, config.rollout
    size = 1 if shares_weights(sampling.engine) else sampling.tensor_parallel
    copies = place.devices // size
    on = f"{place.devices} on {place.nodes} machines, in workers of Ray" if place.nodes > 1 else str(place.devices)
    share = f" with {size} devices each" if size > 1 else ""
    return f"{on}: {copies} cop{'y' if copies == 1 else 'ies'} of the sampler{share}"


def plan_json(request: GenerateRequest) -> str:
    rows = request.rows
    responses = None if rows is None else rows * request.loaded.config.rollout.samples_per_prompt
    return json.dumps(document(request.loaded, {"rows": rows, "responses": responses}), indent=2)
