"""A user's dataset and sampler, in the child process that holds them: the handler of calls that ``own_prompts`` makes.

Both are constructed as verl does: ``Class(data_files=[...], tokenizer=..., processor=None, config=...)`` with the section
``data`` as a DictConfig, and ``Sampler(data_source=dataset, data_config=config)``. ``parquet_files``,
``max_samples`` and ``what`` (training or validation) are given to a class that takes them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from posttrain.config.model import ModelConfig
from posttrain.data.verl.table import Table, arguments_taken
from posttrain.errors import ConfigError, Problem
from posttrain.libraries.verl import modules as verl_modules
from posttrain.libraries.verl.protocol import scored_batch
from posttrain.models.loading import load_tokenizer
from posttrain.processes import wire
from posttrain.user_files import import_path

IMAGES = ("multi_modal_data", "multi_modal_inputs")
_TENSOR = "posttrain:tensor"


def tokenizer_of(model: Mapping[str, Any]) -> Any:
    """Load the tokenizer of a ``ModelConfig`` in plain values. Raises: ModelError."""
    return load_tokenizer(ModelConfig.model_validate(model))


def make(setup: Mapping[str, Any]) -> OwnRows:
    """Construct the dataset and the sampler. Raises: ConfigError, with the user's own file and line; any error of the classes."""
    verl_modules.provide()
    tokenizer = tokenizer_of(setup["model"])
    config = OmegaConf.create(setup["options"])
    if setup["dataset"] is None:
        dataset: Any = PreparedRows(setup["rows"])
    else:
        made = _class(*setup["dataset"], what="dataset")
        files = list(setup["files"])
        offered = {"data_files": files, "parquet_files": files, "tokenizer": tokenizer, "processor": None}
        offered |= {"config": config, "max_samples": setup["max_samples"], "what": setup["what"]}
        dataset = made(**arguments_taken(made, offered))
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                what = f"{made.__name__} has no {method}, so its rows cannot be numbered"
                raise ConfigError(Problem(what, fix=f"define {method}", field="data.dataset_class_name"))
    sampler = None
    if setup["sampler"] is not None:
        made = _class(*setup["sampler"], what="sampler")
        sampler = made(**arguments_taken(made, {"data_source": dataset, "data_config": config}))
    return OwnRows(dataset, sampler)


class PreparedRows:
    """The run's own prompts, in verl's fields, for a sampler beside no dataset class."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.dataframe = Table(rows)

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row: dict[str, Any] = self.dataframe[item]
        return {**row, "input_ids": torch.tensor(row["raw_prompt_ids"])}


class OwnRows:
    """Answers {method: argument}: length, rows, describe, draw, learn, state and restore."""

    def __init__(self, dataset: Any, sampler: Any):
        self._dataset = dataset
        self._sampler = sampler
        self._order: Iterator[Any] | None = None
        self._digest = hashlib.sha256()

    def __call__(self, call: Mapping[str, Any]) -> Any:
        [(name, value)] = call.items()
        return getattr(self, f"_{name}")(value)

    def _length(self, _: Any) -> int:
        return len(self._dataset)

    def _rows(self, bounds: Sequence[int]) -> list[dict[str, Any]]:
        return [_row(self._dataset[index], index) for index in range(*bounds)]

    def _draw(self, count: int) -> list[int]:
        """Return up to ``count`` row numbers, fewer where the epoch ends."""
        if self._order is None:
            self._order = iter(self._sampler)
        drawn: list[int] = []
        while len(drawn) < count:
            try:
                drawn.append(int(next(self._order)))
            except StopIteration:
                self._order = None
                break
        self._digest.update(f"{drawn}{self._order is None}".encode())
        return drawn

    def _describe(self, _: Any) -> dict[str, Any]:
        """Return the length of an epoch, where the sampler says it, and which optional methods it has."""
        try:
            length: int | None = len(self._sampler)
        except (TypeError, NotImplementedError):
            length = None
        return {
            "length": length,
            "state": self._keeps_state(),
            "learns": callable(getattr(self._sampler, "update", None)),
        }

    def _learn(self, batch: Mapping[str, Any]) -> None:
        self._sampler.update(batch=scored_batch(batch))

    def _state(self, _: Any) -> dict[str, Any]:
        state = {"digest": self._digest.hexdigest(), "sampler": None}
        if self._keeps_state():
            state["sampler"] = _plain_state(self._sampler.state_dict())
        return state

    def _restore(self, saved: Mapping[str, Any]) -> bool:
        """Go to a saved position: by the sampler's own state, else by drawing again what was drawn. Returns: True when the rows
        are the same."""
        if self._keeps_state() and saved["state"]["sampler"] is not None:
            self._sampler.load_state_dict(_state_of(saved["state"]["sampler"]))
            self._digest = hashlib.sha256(saved["state"]["digest"].encode())  # of what comes after
            return True
        for count, times in saved["draws"]:
            for _ in range(times):
                self._draw(count)
        return self._digest.hexdigest() == str(saved["state"]["digest"])

    def _keeps_state(self) -> bool:
        return all(callable(getattr(self._sampler, name, None)) for name in ("state_dict", "load_state_dict"))


def _class(path: str, name: str, *, what: str) -> type:
    found = getattr(import_path(path), name, None)
    if not isinstance(found, type):
        field = f"data.{what}_class_name"
        raise ConfigError(Problem(f"there is no class {name} in {path}", field=field))
    return found


def _row(item: Any, index: int) -> dict[str, Any]:
    """Return a row in values that can be sent: {"token_ids", "record"}, or {"problem"}."""
    if not isinstance(item, Mapping):
        return {"problem": f"is a {type(item).__name__}; a mapping with verl's fields is expected"}
    if any(len(item[name]) for name in IMAGES if isinstance(item.get(name), Mapping)):
        return {
            "problem": f"has {' and '.join(name for name in IMAGES if item.get(name))}: images come from files only"
        }
    ids: Any = item.get("raw_prompt_ids")
    if ids is None and item.get("input_ids") is not None:
        ids = torch.as_tensor(item["input_ids"]).flatten()
        mask = item.get("attention_mask")
        ids = ids if mask is None else ids[torch.as_tensor(mask).flatten().bool()]
    record = {}
    for name, value in item.items():
        if isinstance(value, torch.Tensor) or name == "raw_prompt_ids":
            continue
        value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        try:
            wire.to_bytes(value)
        except (TypeError, ValueError, RecursionError):
            continue  # nothing here reads it
        record[str(name)] = value
    return {"token_ids": None if ids is None else [int(one) for one in ids], "record": record}


def _plain_state(state: Any) -> Any:
    """Return a sampler's state with its tensors as bytes."""
    if isinstance(state, torch.Tensor):
        array = state.detach().cpu().numpy()
        data = base64.b64encode(array.tobytes()).decode()
        return {_TENSOR: [str(array.dtype), list(array.shape), data]}
    if isinstance(state, Mapping):
        return {str(name): _plain_state(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain_state(value) for value in state]
    return state


def _state_of(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        if _TENSOR in plain:
            kind, shape, data = plain[_TENSOR]
            array = np.frombuffer(base64.b64decode(data), dtype=kind).reshape(shape)
            return torch.from_numpy(array.copy())
        return {name: _state_of(value) for name, value in plain.items()}
    return [_state_of(value) for value in plain] if isinstance(plain, list) else plain
