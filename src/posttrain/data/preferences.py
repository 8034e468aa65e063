"""Preferences from dataset files: read, templated, tokenised and cut, once, when the dataset is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from posttrain.config.tune import TuneConfig
from posttrain.data.assistant_tokens import Template, Tokens, conversation_tokens
from posttrain.data.cells import Message
from posttrain.data.images import CHOOSE_A_VISION_MODEL, PromptImageReader
from posttrain.data.preference_rows import PreferenceRow, read_preference_rows
from posttrain.data.prompts import file_labels
from posttrain.data.readers import MAX_LISTED
from posttrain.data.sft import FIELDS, What, check_end, overlong_problem
from posttrain.data.templates import apply_template, check_template
from posttrain.errors import DataError, ModelError, Problem
from posttrain.records.preferences import Preference
from posttrain.records.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ReadRow = tuple[str, PreferenceRow, list[Tokens]]  # its name, and the tokens of its sides


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSet:
    """The rows of one dataset, in file order, with counts of dropped and cut ones."""

    rows: list[Preference]
    read: int
    dropped: int = 0  # a side was longer than max_tokens
    cut: int = 0
    alike: int = 0  # pairs whose sides are equal tokens after the cut, or have none left

    def notes(self, what: What) -> list[str]:
        """Return messages about rows that were left out or cut."""
        said = {
            "are too long and were left out": self.dropped,
            "are too long and were cut": self.cut,
            "have nothing to compare after the cut, and are left out": self.alike,
        }
        return [f"{count} of {self.read} {what} rows {fate}" for fate, count in said.items() if count]


def load_preferences(
    files: Sequence[str],
    config: TuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: PromptImageReader | None = None,
    *,
    what: What,
) -> PreferenceSet:
    """Load all rows of ``files``, in order and concatenated; ``processor`` belongs to a vision model.

    Raises: ModelError when the tokenizer has no chat template or no end token, or rows have images and there is no
        ``processor``; DataError with the bad rows of all files,
        with the rows that are too long (``overlong: error``), or when none is left.
    """
    if problems := [*check_template(tokenizer, config.data.chat_template_options), *check_end(tokenizer)]:
        raise ModelError(problems)
    rows: list[ReadRow] = []
    for file, label in zip(files, file_labels(files), strict=True):
        try:
            for row in read_preference_rows(file, config.data, config.method):
                try:
                    sides = [_side(row, side, config, tokenizer, processor) for side in row.completions]
                except DataError as error:
                    problems += [Problem(f"row {row.number} of {label}: {each.what}") for each in error.problems]
                else:
                    rows.append((f"{label}:{row.number}", row, sides))
        except DataError as error:
            problems += error.problems
    if problems:
        more = [Problem(f"… and {len(problems) - MAX_LISTED} more rows")] if len(problems) > MAX_LISTED else []
        raise DataError([*problems[:MAX_LISTED], *more])
    if not rows:
        raise DataError(Problem(f"the {what} files hold no rows", field=FIELDS[what]))
    with_images = [name for name, row, _ in rows if row.images]
    if with_images and processor is None:
        raise ModelError(
            Problem(
                f"{len(with_images)} of {len(rows)} rows have images ({with_images[0]} is the first), and the model reads "
                "text only",
                fix=CHOOSE_A_VISION_MODEL,
                field="model.path",
            )
        )
    return cut_preferences(rows, config, what, processor)


def cut_preferences(
    rows: Sequence[ReadRow], config: TuneConfig, what: What, processor: PromptImageReader | None = None
) -> PreferenceSet:
    """Cut sides to max_tokens, and drop rows that cannot be compared any more. A prompt with images loses none of its tokens.

    Raises: DataError with the rows that are too long (``overlong: error``), or when none is left.
    """
    limit, rule = config.data.max_tokens, config.data.overlong
    overlong = [(name, longest) for name, _, sides in rows if (longest := max(len(ids) for ids, _ in sides)) > limit]
    if rule == "truncate_left":  # cuts into prompts
        whole = {name for name, row, _ in rows if row.images}
        refused = [each for each in overlong if each[0] in whole]
    else:
        refused = overlong if rule == "error" else []
    if refused:
        raise DataError(overlong_problem(refused, len(rows), limit, what))
    kept, dropped, alike = [], 0, 0
    for name, row, sides in rows:
        if rule == "filter" and max(len(ids) for ids, _ in sides) > limit:
            dropped += 1
            continue
        part = slice(-limit, None) if rule == "truncate_left" else slice(limit)
        images = processor.prompt_images(row.images) if processor is not None and row.images else None
        texts = []
        for ids, learned in sides:
            marks = learned[part].copy()
            marks[:1] = False  # no token predicts the first one
            texts.append(Text(name=name, token_ids=ids[part], learned=marks, images=images))
        equal = len(texts) == 2 and np.array_equal(texts[0].token_ids, texts[1].token_ids)
        if equal or not all(text.learned.any() for text in texts):
            alike += 1
            continue
        kept.append(
            Preference(
                name=name,
                sides=tuple(texts),
                desirable=row.desirable,
                margin=row.margin,
                ref_logps=row.ref_logps,
            )
        )
    if not kept:
        text = f"no {what} row is left: all {len(rows)} are too long for {limit} tokens, or have equal sides there"
        raise DataError(Problem(text, fix="raise data.max_tokens", field="data.max_tokens"))
    cut = len(overlong) if rule.startswith("truncate") else 0
    return PreferenceSet(rows=kept, read=len(rows), dropped=dropped, cut=cut, alike=alike)


def _side(
    row: PreferenceRow,
    side: list[Message],
    config: TuneConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: PromptImageReader | None,
) -> Tokens:
    """Return the tokens of a prompt with one completion, and those of the completion that the assistant wrote.

    A plain answer is the prompt as rendered for RL, then the answer and the end token, tokenised separately, so that both sides
    of a pair have the same prompt. A completion of several turns or with tools is rendered by the template as a whole.
    """
    options = config.data.chat_template_options
    if row.tools is None and len(side) == 1 and set(side[0]) == {"role", "content"}:
        sizes = [(image.width, image.height) for image in row.images]
        _, prompt = apply_template(tokenizer, row.prompt, options, processor=processor, sizes=sizes)
        if processor is not None and processor.token in side[0]["content"]:
            raise DataError(
                Problem(f"a completion has {processor.token}, which stands for an image; images belong to the prompt")
            )
        answer = tokenizer(side[0]["content"], add_special_tokens=False, verbose=False)["input_ids"]
        whole = [*prompt, *answer, tokenizer.eos_token_id]
        learned = np.zeros(len(whole), np.bool_)
        learned[len(prompt) :] = True
        return np.array(whole, np.int32), learned
    template = Template(tokenizer=tokenizer, variables=options, tools=row.tools)
    ids, learned = conversation_tokens(template, [*row.prompt, *side], last_only=False)
    answers = sum(message["role"] == "assistant" for message in row.prompt)
    starts = np.flatnonzero(np.diff(np.concatenate([[0], learned.astype(np.int8)])) == 1)
    learned = learned.copy()
    if answers:
        learned[: starts[answers] if answers < len(starts) else len(learned)] = False
    return ids, learned
