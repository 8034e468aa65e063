"""verl's batch as its reward managers and curriculum samplers read it: tensors, objects by row, and facts about the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Tensors(dict[str, Tensor]):
    """Tensors of one batch by name: all have as many rows."""

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([len(next(iter(self.values())))] if self else [0])


@dataclass
class DataProtoItem:
    """One row: tensors without their first dimension, and its objects."""

    batch: dict[str, Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """Rows: ``batch``, tensors [rows, ...]; ``non_tensor_batch``, arrays of objects [rows]; ``meta_info``, of all of them."""

    batch: Tensors = field(default_factory=Tensors)
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> DataProto:
        """Build a batch of tensors, and of objects by row."""
        objects = {name: _array(values) for name, values in (non_tensors or {}).items()}
        return cls(Tensors(tensors or {}), objects, dict(meta_info or {}))

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Build a batch of tensors and arrays of objects, told apart by their kinds."""
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        return cls.from_dict(tensors, {name: data[name] for name in data if name not in tensors}, meta_info)

    def __len__(self) -> int:
        if self.batch:
            return len(next(iter(self.batch.values())))
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def __getitem__(self, item: Any) -> Any:
        """A number gives a ``DataProtoItem``; a slice, a list or a mask gives a batch of these rows."""
        if isinstance(item, int | np.integer):
            return DataProtoItem(
                {name: tensor[int(item)] for name, tensor in self.batch.items()},
                {name: values[int(item)] for name, values in self.non_tensor_batch.items()},
                self.meta_info,
            )
        index = item if isinstance(item, slice) else np.asarray(item)
        rows = np.arange(len(self))[index]
        return DataProto(
            Tensors({name: tensor[torch.from_numpy(rows)] for name, tensor in self.batch.items()}),
            {name: values[rows] for name, values in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[index] for index in range(len(self)))

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return a batch of these rows."""
        chosen: DataProto = self[idxs if isinstance(idxs, list) else np.asarray(idxs)]
        return chosen

    def pop(self, batch_keys: Sequence[str] = (), non_tensor_batch_keys: Sequence[str] = (), **_: Any) -> DataProto:
        """Move tensors and objects into a batch of their own."""
        tensors = Tensors({name: self.batch.pop(name) for name in batch_keys})
        return DataProto(tensors, {name: self.non_tensor_batch.pop(name) for name in non_tensor_batch_keys})


def scored_batch(rows: Mapping[str, Any]) -> DataProto:
    """Build the batch of a scored step in verl's fields.

    Args: ``rows`` holds lists, a value per response: prompt_ids, response_ids, response_mask, score (a number, put on the last
        token), and under "objects" further lists by name.
    Returns: prompts [B, P], left-padded; responses [B, T], right-padded; input_ids, attention_mask and position_ids [B, P + T];
        response_mask, token_level_scores and token_level_rewards [B, T].
    """
    pad = int(rows.get("pad_id") or 0)
    prompts, prompt_mask = _padded(rows["prompt_ids"], pad, left=True)
    responses, there = _padded(rows["response_ids"], pad, left=False)
    sampled, _ = _padded(rows["response_mask"], 0, left=False)
    mask = torch.cat([prompt_mask, there], dim=1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": sampled,
    }
    if "score" in rows:
        scores = torch.zeros(responses.shape, dtype=torch.float32)
        last = (there.sum(dim=1) - 1).clamp(min=0)
        scores[torch.arange(len(scores)), last] = torch.tensor(rows["score"], dtype=torch.float32)
        tensors |= {"token_level_scores": scores, "token_level_rewards": scores.clone()}
    return DataProto.from_dict(tensors, rows["objects"])


def _padded(rows: Sequence[Sequence[int]], value: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return rows in one tensor, and a mask of what is not padding."""
    width = max((len(row) for row in rows), default=0)
    made, mask = torch.full((len(rows), width), value), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        made[index, place], mask[index, place] = torch.tensor(list(row), dtype=torch.long), 1
    return made, mask


def _array(values: Sequence[Any]) -> np.ndarray:
    """Return an array of objects, also where each is a list."""
    made = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        made[index] = value
    return made
