"""Prompts from dataset files: read, templated, tokenised and truncated, once, when the dataset is opened."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.config.data import DataConfig
from posttrain.config.images import ImageSettings
from posttrain.data.images import CHOOSE_A_VISION_MODEL, ImageRules, PromptImageReader
from posttrain.data.readers import MAX_LISTED, DatasetRow, read_rows
from posttrain.data.templated import RAW, marker_in, own_markers, templated_problem
from posttrain.data.templates import TEMPLATE, apply_template, check_template, tokenise_raw
from posttrain.errors import DataError, ModelError, Problem
from posttrain.records.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


What = Literal["training", "validation", "prompt"]
FIELDS = {"training": "data.train_files", "validation": "data.validation_files", "prompt": "data.files"}
Tokenised = tuple[str, list[int]]  # text and token ids
# Messages, sizes of their images (width, height), and the options of their chat template; None: their text as it is.
Conversation = tuple[list[dict[str, Any]], list[tuple[int, int]], dict[str, Any] | None]

# Rows sent to a worker process at a time.
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of one dataset, in file order, with counts of dropped and truncated ones."""

    prompts: list[Prompt]
    rows: int  # in the files
    dropped: int  # longer than max_prompt_tokens and left out
    truncated: int  # longer than max_prompt_tokens and cut

    @classmethod
    def generated(cls, prompts: list[Prompt]) -> PromptSet:
        """Wrap prompts that come from no file."""
        return cls(prompts=prompts, rows=len(prompts), dropped=0, truncated=0)

    def overlong_message(self, what: What) -> list[str]:
        """Return a message when prompts were left out or cut; else none."""
        if not self.dropped and not self.truncated:
            return []
        fate = f"{self.dropped} of {self.rows} {_called(what)} are too long and were left out"
        if self.truncated:
            fate = f"{self.truncated} of {self.rows} {_called(what)} are too long and were cut"
        return [fate]


def load_prompts(
    files: Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    what: What,
    limit: int | None = None,
    processor: PromptImageReader | None = None,
    references: bool = True,
) -> PromptSet:
    """Load all prompts of ``files``, in order and concatenated, or the first ``limit`` rows; ``what`` names the dataset in
    errors. From a "prompt" dataset only the prompts are read, as for generation.

    With ``data.filter_workers`` > 1 that many processes tokenise; prompts and their order stay the same. ``processor`` belongs
    to a vision model; a prompt with images is never truncated, since part of an image is invalid. Without ``references`` rows may
    lack a reference answer.

    Raises: ModelError when the tokenizer has no chat template, or rows have images and there is no ``processor``; DataError
    with the bad rows of all files, with prompts that are templated already (``templated_prompts: error``), with those that are
    too long (``overlong_prompts: error``; prompts with images
    that would be truncated), or when no prompt is left.
    """
    raw = data.templated_prompts == RAW
    problems = [] if raw else check_template(tokenizer, data.chat_template_options)
    for source, options in data.source_template_options.items():
        own = {name: value for name, value in options.items() if name != TEMPLATE}
        found = check_template(tokenizer, own, replaced=True)
        problems += [replace(each, field=f"data.source_template_options.{source}") for each in found]
    if problems:
        raise ModelError(problems)
    rows, names = _read(files, data, prompts_only=what == "prompt", references=references)
    rows, names = rows[:limit], names[:limit]
    field = FIELDS[what]
    if not rows:
        raise DataError(Problem(f"the {what} files hold no rows", field=field))
    if processor is None:
        _refuse_images(rows, names)
    if data.templated_prompts == "error":
        _refuse_templated(rows, names, data, tokenizer, what)
    tokenised = _tokenise(rows, names, data, tokenizer, processor)
    return settle_lengths(rows, names, tokenised, data, tokenizer, what=what, processor=processor)


def settle_lengths(
    rows: list[DatasetRow],
    names: list[str],
    tokenised: list[Tokenised],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    what: What,
    processor: PromptImageReader | None,
) -> PromptSet:
    """Apply ``data.overlong_prompts`` to tokenised rows, and make prompts of those that stay.

    Raises: DataError for prompts that are too long, or when none is left.
    """
    longest = data.max_prompt_tokens
    overlong = [index for index, (_, ids) in enumerate(tokenised) if len(ids) > longest]
    refused = {"error": overlong, "filter": []}.get(
        data.overlong_prompts, [index for index in overlong if rows[index].images]
    )
    if refused:
        too_long = [(names[i], len(tokenised[i][1])) for i in refused]
        problem = _overlong_problem(too_long, len(rows), longest, what, images=any(rows[i].images for i in refused))
        raise DataError(problem)
    drop = set(overlong) if data.overlong_prompts == "filter" else set()
    if len(drop) == len(rows):
        shortest = min(len(ids) for _, ids in tokenised)
        text = (
            f"no {what} prompt is left: all {len(rows)} are longer than {longest} tokens (the shortest has {shortest})"
        )
        field = "data.max_prompt_tokens"
        raise DataError(Problem(text, fix=f"raise {field}", field=field))
    for index in [] if drop else overlong:
        ids = cut(tokenised[index][1], longest, data.overlong_prompts)
        tokenised[index] = (str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), ids)
    prompts = [
        _prompt(row, name, text, ids, processor)
        for index, (row, name, (text, ids)) in enumerate(zip(rows, names, tokenised, strict=True))
        if index not in drop
    ]
    return PromptSet(prompts=prompts, rows=len(rows), dropped=len(drop), truncated=0 if drop else len(overlong))


def unread_image_settings(data: ImageSettings, prompts: Sequence[Prompt]) -> list[str]:
    """Report the image settings that have no effect because no prompt has images."""
    if any(prompt.images for prompt in prompts):
        return []
    names = ("image_folder", "max_image_pixels", "image_options", "image_cache_mib")
    default = ImageSettings()
    changed = [f"data.{name}" for name in names if getattr(data, name) != getattr(default, name)]
    have = "have" if len(changed) > 1 else "has"
    return [f"{', '.join(changed)} {have} no effect: no prompt has images"] if changed else []


def cut(ids: list[int], limit: int, how: str) -> list[int]:
    """Truncate ``ids`` to at most ``limit`` tokens: truncate_left keeps the last ones, truncate_right the first, truncate_middle
    the first floor(limit / 2) and the last limit - floor(limit / 2)."""
    if len(ids) <= limit:
        return ids
    if how == "truncate_left":
        return ids[len(ids) - limit :]
    if how == "truncate_right":
        return ids[:limit]
    assert how == "truncate_middle", how
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


def file_labels(files: Sequence[str]) -> list[str]:
    """Return a distinct name per file for prompt ids: the file's own, with as many parent folders as needed to distinguish all
    files. A file that is listed twice gets #2 the second time."""
    paths = [Path(file).expanduser() for file in files]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    seen: dict[Path, int] = {}
    labels = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        labels.append("/".join(path.parts[-depth:]) + (f"#{seen[path]}" if seen[path] > 1 else ""))
    return labels


def _read(
    files: Sequence[str], data: DataConfig, *, prompts_only: bool, references: bool
) -> tuple[list[DatasetRow], list[str]]:
    """Read the rows of all files. Returns: rows, and their prompt ids, such as train.parquet:17."""
    rows: list[DatasetRow] = []
    names: list[str] = []
    problems: list[Problem] = []
    for file, label in zip(files, file_labels(files), strict=True):
        try:
            for row in read_rows(
                file, data, prompts_only=prompts_only, images=ImageRules.of(data), references=references
            ):
                rows.append(row)
                names.append(f"{label}:{row.number}")
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return rows, names


def _refuse_images(rows: list[DatasetRow], names: list[str]) -> None:
    """Raises: ModelError when a row has images."""
    found = [name for row, name in zip(rows, names, strict=True) if row.images]
    if found:
        what = (
            f"{len(found)} of {len(rows)} prompts have images ({found[0]} is the first), and the model reads text only"
        )
        raise ModelError(Problem(what, fix=CHOOSE_A_VISION_MODEL, field="model.path"))


def _refuse_templated(
    rows: list[DatasetRow], names: list[str], data: DataConfig, tokenizer: PreTrainedTokenizerBase, what: What
) -> None:
    """Raises: DataError when the text of a row holds the markers of a chat template."""
    own = own_markers(tokenizer, data.chat_template_options)
    found = [(name, marker) for row, name in zip(rows, names, strict=True) if (marker := marker_in(row.messages, own))]
    if found:
        raise DataError(templated_problem(found, len(rows), _called(what), "data.templated_prompts"))


def _prompt(row: DatasetRow, name: str, text: str, ids: list[int], processor: PromptImageReader | None) -> Prompt:
    return Prompt(
        prompt_id=name,
        token_ids=tuple(ids),
        text=text,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        messages=tuple(row.messages),
        images=processor.prompt_images(row.images) if processor is not None and row.images else None,
    )


def _called(what: What) -> str:
    """Name the prompts of a dataset in messages."""
    return "prompts" if what == "prompt" else f"{what} prompts"


def _overlong_problem(overlong: list[tuple[str, int]], rows: int, limit: int, what: What, *, images: bool) -> Problem:
    first = ", ".join(f"{name} has {length}" for name, length in overlong[:MAX_LISTED])
    more = f", … {len(overlong) - MAX_LISTED} more" if len(overlong) > MAX_LISTED else ""
    longest = max(length for _, length in overlong)
    ways = ["filter"] * (what != "prompt") + ["truncate_left, _right or _middle"] * (not images)
    fix = "raise data.max_prompt_tokens"
    if images:
        fix += ", or lower what an image takes with data.image_options"
    if ways:
        fix += f", or set data.overlong_prompts to {' or '.join(ways)}"
    return Problem(
        f"{len(overlong)} of {rows} {_called(what)} are longer than {limit} tokens: {first}{more}; "
        f"the longest has {longest}" + (", its images' tokens among them; a prompt with images is not cut" * images),
        fix=fix,
        field="data.max_prompt_tokens",
    )


# ------------------------------------------------------------------------------------------------ tokenising


def _tokenise(
    rows: list[DatasetRow],
    names: list[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: PromptImageReader | None,
) -> list[Tokenised]:
    """Return text and token ids of every row. Raises: DataError with the rows whose messages the template rejects."""
    of_source = data.source_template_options
    messages = [
        (
            row.messages,
            [(image.width, image.height) for image in row.images],
            None if data.templated_prompts == RAW else of_source.get(row.data_source, data.chat_template_options),
        )
        for row in rows
    ]
    if data.filter_workers == 1:
        results = _tokenise_chunk(messages, tokenizer, processor)
    else:
        chunks = [messages[start : start + _CHUNK] for start in range(0, len(messages), _CHUNK)]
        # spawn: forking a process with threads (torch, tokenizers) can deadlock
        with ProcessPoolExecutor(
            min(data.filter_workers, len(chunks)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer, processor),
        ) as pool:
            results = [result for chunk in pool.map(_work, chunks) for result in chunk]
    bad = [
        Problem(f"row {name.rpartition(':')[2]} of {name.rpartition(':')[0]}: {result}", field="data.prompt_column")
        for name, result in zip(names, results, strict=True)
        if isinstance(result, str)
    ]
    if bad:
        more = [Problem(f"… and {len(bad) - MAX_LISTED} more rows")] if len(bad) > MAX_LISTED else []
        raise DataError(bad[:MAX_LISTED] + more)
    return [result for result in results if not isinstance(result, str)]


def _tokenise_chunk(
    messages: list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    processor: PromptImageReader | None,
) -> list[Tokenised | str]:
    """Return, per row, text and token ids, or the description of its problem."""
    results: list[Tokenised | str] = []
    for conversation, sizes, options in messages:
        try:
            if options is None:
                text, ids = tokenise_raw(tokenizer, conversation, processor=processor, sizes=sizes)
            else:
                text, ids = apply_template(tokenizer, conversation, options, processor=processor, sizes=sizes)
        except DataError as error:
            results.append(str(error))
        else:
            results.append((text, ids) if ids else "the chat template renders an empty prompt")
    return results


# Tokenizer and processor of a worker.
_worker: tuple[Any, PromptImageReader | None]


def _start_worker(tokenizer: PreTrainedTokenizerBase, processor: PromptImageReader | None) -> None:
    global _worker
    _worker = (tokenizer, processor)


def _work(messages: list[Conversation]) -> list[Tokenised | str]:
    return _tokenise_chunk(messages, *_worker)
