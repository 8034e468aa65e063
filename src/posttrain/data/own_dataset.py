"""Texts from a user's own dataset class, in the form documented by verl (data.custom_cls).

The class is constructed once per dataset, ``Class(parquet_files=[...], tokenizer=..., config=...)``, and read like a list. Its
items are mappings with ``input_ids`` and ``loss_mask``, one row each, and optionally an ``attention_mask`` that marks padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from omegaconf import OmegaConf

from posttrain.config.sft import SftDataConfig, TextDataConfig
from posttrain.data.assistant_tokens import Tokens
from posttrain.data.readers import MAX_LISTED
from posttrain.data.sft import FIELDS, TextSet, What, cut_texts
from posttrain.errors import ConfigError, DataError, Problem, did_you_mean
from posttrain.user_files import PACKAGE, failed_at, import_path, last_line, place_of, run_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")


def load_own_texts(
    files: Sequence[str], data: SftDataConfig, tokenizer: PreTrainedTokenizerBase, *, what: What
) -> TextSet:
    """Load all items of the class as texts.

    Raises: DataError when the class cannot be loaded or constructed, with the first invalid items, or as ``cut_texts``
        does.
    """
    dataset = make_dataset(files, data, tokenizer, what)
    tokens = read_items(dataset, lambda item, _: tokens_of(item, data), what)
    return cut_texts(tokens, [f"{what}:{index}" for index in range(len(tokens))], data, what)


def read_items(dataset: Any, read: Callable[[Any, int], Item], what: What) -> list[Item]:
    """Read all items. Args: ``read`` takes an item and its number, and raises BadItem.

    Raises: DataError with the first invalid items, or when there are none.
    """
    name = type(dataset).__name__
    items: list[Item] = []
    problems: list[Problem] = []
    for index in range(len(dataset)):
        try:
            items.append(read(dataset[index], index))
        except Exception as error:  # noqa: BLE001  # a user's class may raise anything; it is reported with its item
            said = f"item {index} of {name} {error}"
            if not isinstance(error, BadItem):
                said = f"{failed_at(error, type(dataset))}: item {index} of {name} cannot be read: {last_line(error)}"
            problems.append(Problem(said, field="data.dataset_class_name"))
            if len(problems) == MAX_LISTED:
                break
    if problems:
        raise DataError(problems)
    if not items:
        raise DataError(Problem(f"{name} holds no {what} items", field=FIELDS[what]))
    return items


class BadItem(Exception):
    """An item is invalid; the message describes why."""


def make_dataset(files: Sequence[str], data: TextDataConfig, tokenizer: PreTrainedTokenizerBase, what: What) -> Any:
    """Construct the class. Raises: DataError."""
    file, name = data.dataset_class_file or "", data.dataset_class_name
    field = "data.dataset_class_file"
    try:
        is_module = file.startswith(PACKAGE)
        module = import_path(file) if is_module else run_file(f"posttrain_own_dataset_{Path(file).stem}", Path(file))
    except ConfigError as error:
        raise DataError([replace(each, field=field) for each in error.problems]) from error
    except Exception as error:  # the user's code
        said = f"{place_of(error, file)}: importing the file failed: {last_line(error)}"
        raise DataError(Problem(said, field=field)) from error
    made = getattr(module, name or "", None)
    if not isinstance(made, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        fix = did_you_mean(name or "", classes)
        raise DataError(Problem(f"there is no class {name} in {file}", fix=fix, field="data.dataset_class_name"))
    options = OmegaConf.create(data.dataset_class_options)
    try:
        dataset = made(parquet_files=list(files), tokenizer=tokenizer, config=options)
        len(dataset)
    except Exception as error:  # the user's code
        said = f"{failed_at(error, made)}: {name} could not read the {what} files: {last_line(error)}"
        raise DataError(Problem(said, field="data.dataset_class_name")) from error
    return dataset


def tokens_of(item: Any, data: TextDataConfig, prefix: str = "") -> Tokens:
    """Return token ids without padding, and True for those that are learned. Args: ``prefix`` of the item's keys.

    Raises: BadItem.
    """
    keys = {key: prefix + key for key in ("input_ids", "loss_mask", "attention_mask")}
    if not isinstance(item, Mapping):
        wanted = f"{keys['input_ids']} and {keys['loss_mask']}"
        raise BadItem(f"is {type(item).__name__}; a mapping with {wanted} is expected")
    missing = [keys[key] for key in ("input_ids", "loss_mask") if keys[key] not in item]
    if missing:
        raise BadItem(f"has no {' and no '.join(missing)} (it has {', '.join(map(str, item))})")
    ids, marked = np.asarray(item[keys["input_ids"]]), np.asarray(item[keys["loss_mask"]]).astype(bool)
    there = np.asarray(item.get(keys["attention_mask"], np.ones(ids.shape))).astype(bool)
    if ids.ndim != 1 or ids.shape != marked.shape or ids.shape != there.shape:
        found = (("input_ids", ids), ("loss_mask", marked), ("attention_mask", there))
        shapes = ", ".join(f"{keys[key]} {array.shape}" for key, array in found)
        raise BadItem(f"has tensors of shapes {shapes}; one row each, of one length, is expected")
    if data.dataset_class_mask == "predictions":  # the mask marks the position that predicts the next token
        marked = np.concatenate([[False], marked[:-1]])
    ids, learned = ids[there].astype(np.int32), (marked & there)[there]
    if not learned[1:].any():
        raise BadItem(f"has no token to learn in its {keys['loss_mask']}")
    return ids, learned
