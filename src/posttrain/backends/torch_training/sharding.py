"""How a model and a mini-batch are shared out over the processes of an engine. Here: one process has it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.backends.torch_training.master_weights import MasterWeights
from posttrain.data.packing import PackedSequences
from posttrain.models.chunks import Chunk, whole_chunk
from posttrain.models.packed_attention import shared_layout
from posttrain.records.images import PlacedImages

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """What a forward pass of this process reads: a packed row, or a stretch of one."""

    token_ids: Tensor  # [n] int64
    position_ids: Tensor  # [n] int64
    layout: Any  # attention_layout of the model's forward
    predicting: Tensor  # [m] int64, position (in n) whose next token is a scored one
    targets: Tensor  # [m] int64, the scored tokens
    places: Tensor | None = (
        None  # [k] int64, of the first k of the m scores among all of the packed row; None: m are all
    )
    images: tuple[PlacedImages, ...] = ()


class Sharding:
    """One process. Engines over several processes inject a subclass; all of them make the same calls with the same batches,
    and get the same results."""

    rank = 0
    ranks = 1
    sequence = 1  # processes that share a sequence
    offload_optimizer = False  # keep its averages in CPU memory between updates
    starts_on_cpu = False  # parts are cut out of a model in CPU memory, so that a device never holds all of it
    splits_when_out_of_memory = True  # with others in lockstep, one process cannot go another way alone

    def beside(self, options: Mapping[str, Any], role: str) -> Sharding:
        """For another model in the same processes, with engine options of its own."""
        return self

    def wrap(self, model: PreTrainedModel) -> None:
        """Share the parameters out, in place."""

    def masters(self, model: PreTrainedModel, dtype: torch.dtype) -> MasterWeights:
        """What is trained of a model that was wrapped, in the dtype that is trained."""
        return MasterWeights(model, dtype)

    def weights(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """What is trained, whole, on the CPU, by name. All processes must go through it together."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name, self.whole(parameter)

    def everything(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]] | None:
        """All weights, whole, on the CPU, by name, of a Hugging Face model that has given its own away; None: it has them."""
        return None

    def forward(self, model: nn.Module, scores: Callable[[], T]) -> T:
        """``scores()``, which runs the model, in a place where its parameters can be read."""
        return scores()

    def row(self, packed: PackedSequences) -> Row:
        """What this process reads of a packed row."""
        return Row(
            token_ids=packed.token_ids,
            position_ids=packed.position_ids,
            layout=shared_layout(packed.groups, packed.token_ids.device),
            predicting=packed.predicting,
            targets=packed.targets,
            images=packed.images,
        )

    def pooled(self, max_tokens: int | None) -> int | None:
        """A budget of tokens per device, for all devices that share a sequence."""
        return max_tokens * self.sequence if max_tokens is not None else None

    def collected(self, values: Tensor, row: Row, packed: PackedSequences) -> Tensor:
        """[m] scores of this process's row to all [M] of the packed row, carrying gradient."""
        return values

    def deal(self, parts: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
        """The micro-batches of this process, as many as every other one has; an empty one is run and counts nothing."""
        return parts

    def joined(self, values: Tensor, rows: Sequence[int], count: int) -> Tensor:
        """[rows of this process, T] to [count, T], with everyone's rows in their places."""
        out = values.new_zeros(count, *values.shape[1:])
        out[torch.tensor(list(rows), dtype=torch.int64)] = values
        return out

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over all processes."""
        return dict(sums)

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor, on the CPU, from the part that is here."""
        return tensor.detach().cpu().contiguous()

    def chunks(self, tensors: Mapping[str, Tensor]) -> list[Chunk]:
        """What this process writes of these tensors where each writes its own part: every number is written once."""
        return [whole_chunk(name, tensor.detach().cpu()) for name, tensor in tensors.items()] if self.rank == 0 else []

    def shape(self, tensor: Tensor) -> torch.Size:
        """Of all of it."""
        return tensor.shape

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The part of a whole tensor that belongs here, placed as ``like`` is."""
        return tensor.to(like.device)

    def wait(self) -> None:
        """Until everyone has come so far."""
