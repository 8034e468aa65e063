"""Prompts of a user's own dataset class, and the order of a user's own sampler class, in the form documented by verl.

The classes live in a child process (``own_rows``), which also makes verl's names importable; what it sends are plain values.
docs/own-classes.md lists what the classes are given and what is read of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from posttrain.config.data import DataConfig
from posttrain.config.model import ModelConfig
from posttrain.data.columns import ALL, DATA_SOURCE, GROUND_TRUTH
from posttrain.data.prompts import FIELDS, PromptSet, Tokenised, What, settle_lengths
from posttrain.data.readers import MAX_LISTED, DatasetRow
from posttrain.data.record_files import Unreachable, drill
from posttrain.data.templates import apply_template
from posttrain.errors import ConfigError, DataError, Problem
from posttrain.processes.child import Child, ChildFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FACTORY = "posttrain.build.own_rows:make"
ROWS_PER_CALL = 256
FIELD = "data.dataset_class_name"
SAMPLER = "data.sampler_class_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPrompts:
    """The prompts of a class, and the process that holds it, which its reader closes."""

    prompts: PromptSet
    child: Child


def load_own_prompts(
    files: Sequence[str],
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    what: What,
    sampler: bool = False,
) -> OwnPrompts:
    """Construct the dataset class on ``files`` and read all of its rows, in order. With ``sampler`` the sampler class is
    constructed beside it.

    Raises: ConfigError when a class cannot be constructed; DataError with the first invalid rows, or as ``load_prompts`` for
        prompts that are too long.
    """
    limit = data.max_prompts if what == "training" else None
    child = start(files, data, model, sampler=sampler, limit=limit, what=what)
    try:
        rows, names, tokenised = _read(child, data, tokenizer, what)
        prompts = settle_lengths(rows, names, tokenised, data, tokenizer, what=what, processor=None)
    except BaseException:
        child.close()
        raise
    return OwnPrompts(prompts=prompts, child=child)


def start(
    files: Sequence[str],
    data: DataConfig,
    model: ModelConfig,
    *,
    sampler: bool,
    limit: int | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    what: What = "training",
) -> Child:
    """Start the process of the classes. Args: ``rows`` stand in for a dataset class where there is none.

    Raises: ConfigError when a class cannot be loaded or constructed.
    """
    classes = {
        "dataset": [data.dataset_class_file, data.dataset_class_name] if data.dataset_class_file else None,
        "sampler": [data.sampler_class_file, data.sampler_class_name] if sampler else None,
    }
    setup = {
        **classes,
        "files": list(files),
        "what": what,
        "options": data.dataset_class_options,
        "max_samples": -1 if limit is None else limit,
        "model": model.model_dump(mode="json"),
        "rows": list(rows),
    }
    try:
        return Child(FACTORY, setup, load_s=data.class_timeout_s, call_s=data.class_timeout_s)
    except ConfigError as error:
        field = FIELD if data.dataset_class_file else SAMPLER
        named = " and ".join(f"{name} of {file}" for file, name in filter(None, classes.values()))
        raise ConfigError(
            [
                replace(each, what=each.what if each.field else f"{named}: {each.what}", field=each.field or field)
                for each in error.problems
            ]
        ) from error


def sampler_rows(prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """Return prompts in verl's fields, for a sampler beside no dataset class."""
    return [
        {
            "data_source": prompt.data_source,
            "prompt": list(prompt.messages),
            "reward_model": {"ground_truth": prompt.ground_truth},
            "extra_info": dict(prompt.extra_info),
            "index": prompt.extra_info.get("index", number),
            "raw_prompt": list(prompt.messages),
            "raw_prompt_ids": list(prompt.token_ids),
        }
        for number, prompt in enumerate(prompts)
    ]


def _read(
    child: Child, data: DataConfig, tokenizer: PreTrainedTokenizerBase, what: What
) -> tuple[list[DatasetRow], list[str], list[Tokenised]]:
    name = data.dataset_class_name
    rows: list[DatasetRow] = []
    tokenised: list[Tokenised] = []
    problems: list[Problem] = []
    try:
        length = int(child.call({"length": None}))
        for first in range(0, length, ROWS_PER_CALL):
            for number, item in enumerate(child.call({"rows": [first, min(first + ROWS_PER_CALL, length)]}), first):
                found = _checked(item, number, data, tokenizer)
                if isinstance(found, str):
                    problems.append(Problem(f"item {number} of {name} {found}", field=FIELD))
                else:
                    rows.append(found[0])
                    tokenised.append(found[1])
            if len(problems) >= MAX_LISTED:
                break
    except ChildFailed as error:
        raise DataError(Problem(f"{name} of {data.dataset_class_file}: {error}", field=FIELD)) from error
    if problems:
        raise DataError(problems[:MAX_LISTED])
    if not rows:
        raise DataError(Problem(f"{name} holds no {what} rows", field=FIELDS[what]))
    return rows, [f"{what}:{row.number}" for row in rows], tokenised


def _checked(
    item: Mapping[str, Any], number: int, data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[DatasetRow, Tokenised] | str:
    """Return a row and its tokens, or what is wrong with it."""
    if "problem" in item:
        return str(item["problem"])
    record, ids = item["record"], item["token_ids"]
    messages = record.get("raw_prompt") or record.get("prompt") or []
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        return "has a raw_prompt that is no list of messages"
    if ids is None and not messages:
        return f"has no raw_prompt_ids, no input_ids and no raw_prompt (it has {', '.join(record) or 'nothing'})"
    if ids is None:
        try:
            text, ids = apply_template(tokenizer, messages, data.chat_template_options)
        except DataError as error:
            return f"has a raw_prompt that cannot be rendered: {error}"
    elif not ids or not all(0 <= each < len(tokenizer) for each in ids):
        return "has an empty prompt" if not ids else f"has token ids outside of the tokenizer's {len(tokenizer)}"
    else:
        text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    source_column = data.data_source_column or next((name for name in DATA_SOURCE if name in record), "")
    source = record.get(source_column)
    if not isinstance(source, str) or not source:
        return f"has no data_source (it has {', '.join(record)})"
    extra = record.get(data.extra_info_column) or {}
    if not isinstance(extra, Mapping):
        return f"has {data.extra_info_column} that is no mapping"
    more = (
        record if ALL in data.extra_columns else {name: record[name] for name in data.extra_columns if name in record}
    )
    row = DatasetRow(
        number=number,
        messages=[dict(each) for each in messages],
        data_source=source,
        ground_truth=_ground_truth(record, data.ground_truth_column),
        extra_info={**more, **extra},
    )
    return row, (text, list(ids))


def _ground_truth(record: Mapping[str, Any], named: str | None) -> Any:
    for column in (named,) if named else GROUND_TRUTH:
        try:
            return drill(record, column)
        except Unreachable:
            continue
    return None
