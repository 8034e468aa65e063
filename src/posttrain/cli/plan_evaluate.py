"""The plan of an evaluation, with every problem found before scoring."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.cli.plan_plain import closing, document
from posttrain.config.evaluate import EvaluateConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import DataError, Problem, RequestError
from posttrain.plan.files import check_output_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRequest:
    loaded: LoadedConfig[EvaluateConfig]
    sources: Mapping[str, str]  # data source -> the first file that holds it; empty when files are not checked
    rows: int | None  # of all files; None: not counted


def check_request(
    loaded: LoadedConfig[EvaluateConfig], *, look_at_files: bool, to_run: bool = False
) -> EvaluateRequest:
    """Check the configuration, its files, and that every data source in them has a scorer.

    Args: ``to_run`` also rejects what is planned but not built yet.
    Raises: RequestError with all problems.
    """
    problems = [*loaded.problems, *(loaded.unsupported if to_run else ())]
    sources: Mapping[str, str] = {}
    rows = None
    if look_at_files:
        found, sources, rows = _look_at_files(loaded.config)
        problems += loaded.further(found)
    if problems:
        raise RequestError(problems)
    return EvaluateRequest(loaded=loaded, sources=sources, rows=rows)


def _look_at_files(config: EvaluateConfig) -> tuple[list[Problem], Mapping[str, str], int | None]:
    from posttrain.data.record_files import count_rows
    from posttrain.data.responses import check_response_files, response_sources
    from posttrain.rewards.load import check_data_sources

    problems = check_response_files(config.data)
    sources: Mapping[str, str] = {}
    rows = None
    if not problems:
        try:
            rows = sum(map(count_rows, config.data.files))
            sources = response_sources(config.data)
            problems += check_data_sources(config.reward, sources)
        except DataError as error:
            problems += error.problems
    if rows is not None and config.data.max_prompts is not None:
        rows = min(rows, config.data.max_prompts)
    return problems + other_file_problems(config), sources, rows


def other_file_problems(config: EvaluateConfig) -> list[Problem]:
    """Check the files besides the data, which may not be here yet."""
    from posttrain.rewards.load import check_rewards

    return [*check_rewards(config.reward), *check_output_folder(config.folder, "output.folder")]


def plan_text(request: EvaluateRequest) -> str:
    config = request.loaded.config
    terms = [
        (f"{term.weight:g} x " if term.weight != 1 else "") + (f"{term.name} ({term.path})" if term.path else term.name)
        for term in config.reward.terms
    ]
    count = "" if request.rows is None else f": {request.rows} rows"
    metrics = config.metrics
    lines = [
        f"responses  {', '.join(config.data.files)}{count}",
        *([f"sources    {', '.join(request.sources)}"] if request.sources else []),
        f"score      {' + '.join(terms)}",
        f"metrics    right from a score of {metrics.pass_score:g}; {metrics.confidence:.0%} intervals of "
        f"{metrics.bootstrap_draws} bootstrap draws, seed {config.run.seed}",
        f"output     {config.folder}: results.json, report.html, dumped_evals/",
    ]
    return "\n\n".join(["\n".join(lines), *closing(request.loaded)])


def plan_json(request: EvaluateRequest) -> str:
    return json.dumps(document(request.loaded, {"rows": request.rows, "data_sources": list(request.sources)}), indent=2)
