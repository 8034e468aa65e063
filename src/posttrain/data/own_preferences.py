"""Preferences from a user's own dataset class: the form of ``own_dataset``, with two sides or a label.

Items of a method that compares pairs are mappings with ``chosen_input_ids``, ``chosen_loss_mask``, ``rejected_input_ids`` and
``rejected_loss_mask``; those of a method of single completions have ``input_ids``, ``loss_mask`` and ``label``. The settings
``label_column``, ``margin_column`` and ``reference_columns`` name further keys of an item, as they name columns of a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.config.tune import TuneConfig
from posttrain.data.assistant_tokens import Tokens
from posttrain.data.cells import BadCell
from posttrain.data.own_dataset import BadItem, make_dataset, read_items, tokens_of
from posttrain.data.preference_rows import LABEL, MARGIN, PreferenceRow
from posttrain.data.preference_values import label_of, number_of, reference_of
from posttrain.data.preferences import PreferenceSet, ReadRow, cut_preferences
from posttrain.data.sft import What

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_own_preferences(
    files: Sequence[str], config: TuneConfig, tokenizer: PreTrainedTokenizerBase, *, what: What
) -> PreferenceSet:
    """Load all items of the class.

    Raises: DataError when the class cannot be loaded or constructed, with the first invalid items, or as ``cut_preferences``
        does.
    """
    dataset = make_dataset(files, config.data, tokenizer, what)
    rows = read_items(dataset, lambda item, index: _row(item, index, config, what), what)
    return cut_preferences(rows, config, what)


def _row(item: Any, index: int, config: TuneConfig, what: What) -> ReadRow:
    """Return an item as a row with the tokens of its sides. Raises: BadItem."""
    prefixes = ("chosen_", "rejected_") if config.method.paired else ("",)
    sides = [tokens_of(item, config.data, prefix) for prefix in prefixes]
    if len(sides) == 2 and _equal(*sides):
        raise BadItem("has equal sides; a pair needs a better and a worse one")
    data = config.data
    try:
        row = PreferenceRow(
            number=index,
            prompt=[],
            completions=(),
            desirable=config.method.paired or label_of(_value(item, data.label_column or LABEL[0])),
            margin=_margin(item, data.margin_column),
            ref_logps=reference_of([_value(item, key) for key in data.reference_columns])
            if data.reference_columns
            else None,
        )
    except BadCell as error:
        raise BadItem(f"has a value that is wrong: it {error}") from None
    return f"{what}:{index}", row, sides


def _margin(item: Mapping[str, Any], named: str | None) -> float:
    """Return the margin of a pair; 0 where no key is named and the item has none."""
    key = named or MARGIN
    return number_of(_value(item, key)) if named is not None or key in item else 0.0


def _equal(one: Tokens, other: Tokens) -> bool:
    return np.array_equal(one[0], other[0])


def _value(item: Mapping[str, Any], key: str) -> Any:
    if key not in item:
        raise BadItem(f"has no {key} (it has {', '.join(map(str, item))})")
    value = item[key]
    return value.item() if hasattr(value, "item") else value  # a tensor or an array of one number
