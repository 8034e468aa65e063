"""Responses from files, as groups ready for scoring."""

from __future__ import annotations

import json

from posttrain.config.evaluate import EvaluateDataConfig
from posttrain.data.columns import ColumnChoice
from posttrain.data.prompts import file_labels
from posttrain.data.readers import DatasetRow, check_file, data_sources, read_rows
from posttrain.errors import DataError, Problem
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import StopReason, Trajectory, TrajectoryGroup


def load_responses(data: EvaluateDataConfig) -> list[TrajectoryGroup]:
    """Return a group per row of all files, in order. Its prompt and its responses have texts and no tokens.

    Raises: DataError with the bad rows of all files, or when there is no row.
    """
    groups: list[TrajectoryGroup] = []
    problems: list[Problem] = []
    for file, label in zip(data.files, file_labels(data.files), strict=True):
        try:
            rows = read_rows(file, data, responses=data.response_column)
            groups += [_group(row, f"{label}:{row.number}") for row in rows]
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    if not groups:
        raise DataError(Problem("the files hold no rows", field="data.files"))
    return groups[: data.max_prompts]


def check_response_files(data: EvaluateDataConfig) -> list[Problem]:
    """Return the problems that can be found without reading the files through. Raises nothing."""
    problems = []
    for index, path in enumerate(data.files):
        choice = ColumnChoice(data, responses=data.response_column)
        problems += check_file(path, choice, f"data.files.{index}")
    return problems


def response_sources(data: EvaluateDataConfig) -> dict[str, str]:
    """Return every data source and the first file that holds it. Raises: DataError."""
    found: dict[str, str] = {}
    for file in data.files:
        for source in sorted(data_sources(file, data, responses=data.response_column)):
            found.setdefault(source, file)
    return found


def _group(row: DatasetRow, name: str) -> TrajectoryGroup:
    prompt = Prompt(
        prompt_id=name,
        token_ids=(),
        text=shown(row.messages),
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        messages=tuple(row.messages),
    )
    trajectories = tuple(
        Trajectory(
            sample_id=f"{name}/{number}",
            token_ids=(),
            logprobs=(),
            text=text,
            stop_reason=StopReason.EOS,  # not known from a file; no score depends on it
            policy_version=0,
        )
        for number, text in enumerate(row.responses)
    )
    return TrajectoryGroup(prompt=prompt, trajectories=trajectories)


def shown(messages: list[dict[str, object]]) -> str:
    """Render a conversation as text: one message as it is, several with their roles."""
    texts = [
        content if isinstance(content := message.get("content"), str) else json.dumps(content, ensure_ascii=False)
        for message in messages
    ]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))
