"""Keys of evaluation.yaml."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped


def _in_a_list(name: str) -> list[str]:
    return [name]


def _row(name: str, type: Any, default: Any, fields: str, meaning: str, **more: Any) -> Key:
    return mapped(name, type, default, fields, meaning, entry="evaluate", **more)


ROWS: tuple[Key, ...] = (
    _row(
        "data.path", str, "/tmp/math_Qwen2-7B-Instruct.parquet", "data.files", "file with the responses", to=_in_a_list
    ),
    _row(
        "data.prompt_key",
        str,
        "prompt",
        "data.prompt_column",
        "column with the prompt",
        to=lambda name: None if name == "prompt" else name,
        change="prompt: null, which does without where the file has none",
        note="verl does not read it; here it is what samples show, and what rewards get that read the prompt.",
    ),
    _row("data.response_key", str, "responses", "data.response_column", "column with the responses, a list of texts"),
    _row("data.data_source_key", str, "data_source", "data.data_source_column", "column that splits the numbers"),
    _row(
        "data.reward_model_key",
        str,
        "reward_model",
        "data.ground_truth_column",
        "column with the ground truth",
        to=lambda name: f"{name}.ground_truth",
        change="KEY: KEY.ground_truth",
    ),
    _row(
        "custom_reward_function.path",
        str | None,
        None,
        "reward.terms",
        "Python file with the scorer",
        by_rule=True,
        change="null: by_data_source, the built-in scorers",
        since="0.4",
        note="verl's page says built-in scorers are used without it; its code fails.",
    ),
    _row(
        "custom_reward_function.name",
        str,
        "compute_score",
        "reward.terms",
        "name of the function in that file",
        by_rule=True,
        since="0.4",
    ),
    _row(
        "custom_reward_function.reward_kwargs.**",
        Any,
        ABSENT,
        "reward.terms",
        "further arguments of the function",
        by_rule=True,
        since="0.4",
    ),
    ignored(
        "ray_init.num_cpus",
        int | None,
        None,
        "responses are scored by processes of this machine: reward.workers",
        "CPUs of Ray",
        entry="evaluate",
        since="0.4",
    ),
)
