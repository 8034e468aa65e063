"""Texts from a user's own dataset class, in the form documented by verl (data.custom_cls).

The class is constructed once per dataset, ``Class(parquet_files=[...], tokenizer=..., config=...)``, and read like a list. Its
items are mappings with ``input_ids`` and ``loss_mask``, one row each, and optionally an ``attention_mask`` that marks padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from posttrain.config.sft import SftDataConfig
from posttrain.data.assistant_tokens import Tokens
from posttrain.data.readers import MAX_LISTED
from posttrain.data.sft import FIELDS, TextSet, What, cut_texts
from posttrain.errors import DataError, Problem, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_own_texts(
    files: Sequence[str], data: SftDataConfig, tokenizer: PreTrainedTokenizerBase, *, what: What
) -> TextSet:
    """Load all items of the class as texts.

    Raises: DataError when the class cannot be loaded or constructed, with the first invalid items, or as ``cut_texts``
        does.
    """
    dataset = _make(files, data, tokenizer, what)
    name = type(dataset).__name__
    tokens: list[Tokens] = []
    problems: list[Problem] = []
    for index in range(len(dataset)):
        try:
            tokens.append(_tokens(dataset[index], data))
        except Exception as error:  # noqa: BLE001  # a user's class may raise anything; it is reported with its item
            said = str(error) if isinstance(error, _BadItem) else f"{type(error).__name__}: {error}"
            problems.append(Problem(f"item {index} of {name} {said}", field="data.dataset_class_name"))
            if len(problems) == MAX_LISTED:
                break
    if problems:
        raise DataError(problems)
    if not tokens:
        raise DataError(Problem(f"{name} holds no {what} items", field=FIELDS[what]))
    return cut_texts(tokens, [f"{what}:{index}" for index in range(len(tokens))], data, what)


class _BadItem(Exception):
    """An item is invalid; the message describes why."""


def _make(files: Sequence[str], data: SftDataConfig, tokenizer: PreTrainedTokenizerBase, what: What) -> Any:
    """Construct the class. Raises: DataError."""
    file, name = Path(data.dataset_class_file or ""), data.dataset_class_name
    field = "data.dataset_class_file"
    spec = spec_from_file_location(f"posttrain_own_dataset_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise DataError(Problem(f"{file} is not a Python file", field=field))
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code
        raise DataError(Problem(f"importing {file} failed: {type(error).__name__}: {error}", field=field)) from error
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
        said = f"{name} of {file} could not read the {what} files: {type(error).__name__}: {error}"
        raise DataError(Problem(said, field="data.dataset_class_name")) from error
    return dataset


def _tokens(item: Any, data: SftDataConfig) -> Tokens:
    """Return token ids without padding, and True for those that are learned."""
    if not isinstance(item, Mapping):
        raise _BadItem(f"is {type(item).__name__}; a mapping with input_ids and loss_mask is expected")
    missing = [key for key in ("input_ids", "loss_mask") if key not in item]
    if missing:
        raise _BadItem(f"has no {' and no '.join(missing)} (it has {', '.join(map(str, item))})")
    ids, marked = np.asarray(item["input_ids"]), np.asarray(item["loss_mask"]).astype(bool)
    there = np.asarray(item.get("attention_mask", np.ones(ids.shape))).astype(bool)
    if ids.ndim != 1 or ids.shape != marked.shape or ids.shape != there.shape:
        shapes = f"input_ids {ids.shape}, loss_mask {marked.shape}, attention_mask {there.shape}"
        raise _BadItem(f"has tensors of shapes {shapes}; one row each, of one length, is expected")
    if data.dataset_class_mask == "predictions":  # the mask marks the position that predicts the next token
        marked = np.concatenate([[False], marked[:-1]])
    ids, learned = ids[there].astype(np.int32), (marked & there)[there]
    if not learned[1:].any():
        raise _BadItem("has no token to learn in its loss_mask")
    return ids, learned
