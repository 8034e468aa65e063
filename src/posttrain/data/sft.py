"""Texts for supervised fine-tuning from dataset files: read, templated, tokenised and cut, once, when the dataset is opened."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from posttrain.config.sft import SftDataConfig
from posttrain.data.assistant_tokens import Template, Tokens, conversation_tokens
from posttrain.data.prompts import file_labels
from posttrain.data.readers import MAX_LISTED
from posttrain.data.sft_rows import SftRow, is_tokenized, read_sft_rows
from posttrain.data.templates import apply_template, check_template
from posttrain.errors import DataError, ModelError, Problem
from posttrain.records.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

What = Literal["training", "validation"]
FIELDS = {"training": "data.train_files", "validation": "data.validation_files"}

# Rows sent to a worker process at a time.
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSet:
    """The texts of one dataset, in file order, with counts of dropped and cut ones."""

    texts: list[Text]
    rows: int  # in the files
    dropped: int = 0  # longer than max_tokens and left out
    cut: int = 0  # longer than max_tokens and cut
    empty: int = 0  # left out because no token is to be learned, or the cut removed all of them

    def notes(self, what: What) -> list[str]:
        """Return messages about rows that were left out or cut."""
        said = {
            "are too long and were left out": self.dropped,
            "are too long and were cut": self.cut,
            "hold no token to learn, within data.max_tokens, and are left out": self.empty,
        }
        return [f"{count} of {self.rows} {what} rows {fate}" for fate, count in said.items() if count]


def load_texts(files: Sequence[str], data: SftDataConfig, tokenizer: PreTrainedTokenizerBase, *, what: What) -> TextSet:
    """Load all texts of ``files``, in order and concatenated.

    Raises: ModelError when the tokenizer has no chat template or no end token; DataError with the bad rows of all files,
        with the rows that are too long (``overlong: error``), or when none is left.
    """
    tokenized = is_tokenized(data, FIELDS[what].removeprefix("data."))
    if not tokenized and (problems := [*check_template(tokenizer, data.chat_template_options), *check_end(tokenizer)]):
        raise ModelError(problems)
    rows, names, sources = _read(files, data, what, tokenized=tokenized)
    if not rows:
        raise DataError(Problem(f"the {what} files hold no rows", field=FIELDS[what]))
    tokenised = _tokenise(rows, names, data, tokenizer)
    return cut_texts(tokenised, names, data, what, sources=sources)


def cut_texts(
    tokenised: Sequence[Tokens], names: Sequence[str], data: SftDataConfig, what: What, *, sources: Sequence[str] = ()
) -> TextSet:
    """Cut texts to max_tokens, and drop those without tokens to learn.

    Args: ``sources``, one for each text, or none.
    Raises: DataError with the rows that are too long (``overlong: error``), or when none is left.
    """
    limit = data.max_tokens
    overlong = [index for index, (ids, _) in enumerate(tokenised) if len(ids) > limit]
    if overlong and data.overlong == "error":
        raise DataError(overlong_problem([(names[i], len(tokenised[i][0])) for i in overlong], len(names), limit, what))
    texts, dropped, empty = [], 0, 0
    for name, source, (ids, learned) in zip(names, sources or [""] * len(names), tokenised, strict=True):
        if len(ids) > limit and data.overlong == "filter":
            dropped += 1
            continue
        kept = slice(-limit, None) if data.overlong == "truncate_left" else slice(limit)
        ids, learned = ids[kept], learned[kept].copy()
        learned[:1] = False  # no token predicts the first one
        if learned.any():
            texts.append(Text(name=name, source=source, token_ids=ids, learned=learned))
        else:
            empty += 1
    if not texts:
        if not overlong:
            text = f"no {what} row is left: none of the {len(names)} holds a token to learn"
            raise DataError(Problem(text, field=FIELDS[what]))
        shortest = min(len(ids) for ids, _ in tokenised)
        text = f"no {what} row is left: all {len(names)} are too long for {limit} tokens (the shortest has {shortest})"
        raise DataError(Problem(text, fix="raise data.max_tokens", field="data.max_tokens"))
    cut = len(overlong) if data.overlong.startswith("truncate") else 0
    return TextSet(texts=texts, rows=len(names), dropped=dropped, cut=cut, empty=empty)


def check_end(tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    if tokenizer.eos_token_id is not None:
        return []
    what = "the tokenizer has no end-of-sequence token, so a model could not learn where an answer ends"
    return [Problem(what, fix="name a tokenizer that has one", field="model.tokenizer_path")]


def _read(
    files: Sequence[str], data: SftDataConfig, what: What, *, tokenized: bool
) -> tuple[list[SftRow], list[str], list[str]]:
    """Read the rows of all files. Returns: rows, their names, such as train.parquet:17, and their sources."""
    rows: list[SftRow] = []
    names: list[str] = []
    sources: list[str] = []
    given = data.train_sources if what == "training" else data.validation_sources
    problems: list[Problem] = []
    for file, label, source in zip(files, file_labels(files), given or [""] * len(files), strict=True):
        try:
            for row in read_sft_rows(file, data, tokenized=tokenized):
                rows.append(row)
                sources.append(source)
                names.append(f"{label}:{row.number}")
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return rows, names, sources


def overlong_problem(overlong: list[tuple[str, int]], rows: int, limit: int, what: What) -> Problem:
    first = ", ".join(f"{name} has {length}" for name, length in overlong[:MAX_LISTED])
    more = f", … {len(overlong) - MAX_LISTED} more" if len(overlong) > MAX_LISTED else ""
    longest = max(length for _, length in overlong)
    return Problem(
        f"{len(overlong)} of {rows} {what} rows are longer than {limit} tokens: {first}{more}; the longest has {longest}",
        fix="raise data.max_tokens, or set data.overlong to filter, truncate_left or truncate_right",
        field="data.max_tokens",
    )


# ------------------------------------------------------------------------------------------------ tokenising


def row_tokens(
    row: SftRow, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], *, last_only: bool
) -> Tokens:
    """Return the tokens of a row, and those that are learned.

    A row of tokens is as it is; a prompt with its response is the prompt as rendered for RL, then the response and the end token,
    tokenised separately.

    Raises: DataError when the chat template rejects it, or does not show what the assistant wrote.
    """
    if row.tokens is not None:
        ids, marked = row.tokens
        return np.array(ids, np.int32), np.array(marked, np.bool_)
    variables = {**options, **(row.variables or {})}
    if row.response is None:
        template = Template(tokenizer=tokenizer, variables=variables, tools=row.tools)
        return conversation_tokens(template, row.messages, last_only=last_only)
    _, prompt = apply_template(tokenizer, row.messages, variables)
    response = [*tokenizer(row.response, add_special_tokens=False, verbose=False)["input_ids"], tokenizer.eos_token_id]
    learned = np.zeros(len(prompt) + len(response), np.bool_)
    learned[len(prompt) :] = True
    return np.array([*prompt, *response], np.int32), learned


def _tokenise(
    rows: Sequence[SftRow], names: Sequence[str], data: SftDataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Tokens]:
    """Return the tokens of every row. Raises: DataError with the rows that the template rejects."""
    last_only = data.train_on == "last_turn"
    if data.tokenize_workers == 1:
        results = _tokenise_chunk(rows, tokenizer, data.chat_template_options, last_only)
    else:
        chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
        # spawn: forking a process with threads (torch, tokenizers) can deadlock
        with ProcessPoolExecutor(
            min(data.tokenize_workers, len(chunks)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(tokenizer, data.chat_template_options, last_only),
        ) as pool:
            results = [result for chunk in pool.map(_work, chunks) for result in chunk]
    bad = [(name, result) for name, result in zip(names, results, strict=True) if isinstance(result, Problem)]
    if bad:
        problems = [
            Problem(f"row {name.rpartition(':')[2]} of {name.rpartition(':')[0]}: {problem.what}", fix=problem.fix)
            for name, problem in bad[:MAX_LISTED]
        ]
        more = [Problem(f"… and {len(bad) - MAX_LISTED} more rows")] if len(bad) > MAX_LISTED else []
        raise DataError(problems + more)
    return [result for result in results if not isinstance(result, Problem)]


def _tokenise_chunk(
    rows: Sequence[SftRow], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], last_only: bool
) -> list[Tokens | Problem]:
    """Return, per row, its tokens or its problem."""
    results: list[Tokens | Problem] = []
    for row in rows:
        try:
            results.append(row_tokens(row, tokenizer, options, last_only=last_only))
        except DataError as error:
            results.append(error.problems[0])
    return results


_worker: tuple[Any, Mapping[str, Any], bool]  # tokenizer, template options and last_only of a worker process


def _start_worker(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], last_only: bool) -> None:
    global _worker
    _worker = (tokenizer, options, last_only)


def _work(rows: Sequence[SftRow]) -> list[Tokens | Problem]:
    return _tokenise_chunk(rows, *_worker)
