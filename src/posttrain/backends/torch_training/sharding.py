"""Sharding of a model and of mini-batches over the processes of an engine; the base class here is for one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.backends.torch_training.master_weights import MasterWeights
from posttrain.data.packing import OwnDistributions, PackedSequences
from posttrain.models.chunks import Chunk, whole_chunk
from posttrain.models.packed_attention import shared_layout
from posttrain.models.vision import AddedFeatures, model_inputs
from posttrain.records.images import PlacedImages, PromptImages

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """Input of this process's forward pass: a packed row, or a slice of one."""

    token_ids: Tensor  # [n] int64
    position_ids: Tensor  # [n] int64
    layout: Any  # attention_layout of the model's forward
    predicting: Tensor  # [m] int64, position (in n) whose next token is a scored one
    targets: Tensor  # [m] int64, the scored tokens
    places: Tensor | None = (
        None  # [k] int64, of the first k of the m scores among all of the packed row; None: m are all
    )
    images: tuple[PlacedImages, ...] = ()
    # Images that the vision tower reads besides, one after the other and with weight 0: other processes run it as much more often
    idle_images: tuple[PromptImages, ...] = ()
    whole: PackedSequences | None = None  # of a slice of a row with images
    stretch: Callable[[Tensor], Tensor] | None = None  # takes the slice from values of the whole row, [N, ...]
    own: OwnDistributions | None = None  # of some of the m scores; None: all have the run's
    # Of the tokens that this process's routers see:
    experts: Tensor | None = None  # [n, layers, chosen], which they replay
    counted: Tensor | None = None  # [n] bool, at which losses of routers look

    def inputs(self, model: PreTrainedModel) -> dict[str, Any]:
        """Compute the forward inputs of this process's part: see ``models.vision.model_inputs``. Images may lie across borders of
        slices, so the embeddings of the whole row are computed, and each process takes its own."""
        if self.whole is None or self.stretch is None:
            return model_inputs(model, self.token_ids, self.position_ids, self.images, self.idle_images)
        inputs = model_inputs(model, self.whole.token_ids, self.whole.position_ids, self.images, self.idle_images)
        positions = inputs["position_ids"]  # [1, N], or [3, 1, N]
        more = {name: each.part(self.stretch) for name, each in inputs.items() if isinstance(each, AddedFeatures)}
        return {
            "inputs_embeds": self.stretch(inputs["inputs_embeds"][0])[None],
            "position_ids": self.stretch(positions.movedim(-1, 0)).movedim(0, -1),
            **more,
        }


class Sharding:
    """One process. Engines over several processes inject a subclass; all of them make the same calls with the same batches,
    and get the same results."""

    rank = 0
    ranks = 1
    sequence = 1  # processes that share a sequence
    offload_optimizer = False  # keep its averages in CPU memory between updates
    starts_on_cpu = False  # load on the CPU and shard from there, so that a device never holds the whole model
    skips_backward = True  # a forward pass need not be followed by a backward pass
    splits_when_out_of_memory = True  # False for processes in lockstep, none of which may deviate

    def beside(self, options: Mapping[str, Any], role: str) -> Sharding:
        """Return the sharding of another model in the same processes, with its own engine options."""
        return self

    def wrap(self, model: PreTrainedModel) -> None:
        """Shard the parameters, in place."""

    def masters(self, model: PreTrainedModel, dtype: torch.dtype) -> MasterWeights:
        """Return the trained parameters of a wrapped model, in the dtype that is trained."""
        return MasterWeights(model, dtype)

    def weights(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights, whole, on the CPU, by name. A collective call of all processes."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name, self.whole(parameter)

    def everything(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]] | None:
        """Yield all weights, whole, on the CPU, by name, of a model whose own weights were released; None: it still has them."""
        return None

    def forward(self, model: nn.Module, scores: Callable[[], T]) -> T:
        """Run ``scores()``, which runs the model, in a context where its parameters are readable."""
        return scores()

    def begin(self, images: Sequence[PromptImages | None]) -> None:
        """Begin the passes over a batch with these images of its rows."""

    def row(self, packed: PackedSequences, counted: Tensor | None = None) -> Row:
        """Return the part of a packed row that this process reads. Args: counted [N] bool, the tokens at which losses of routers
        look."""
        return Row(
            token_ids=packed.token_ids,
            position_ids=packed.position_ids,
            layout=shared_layout(packed.groups, packed.token_ids.device),
            predicting=packed.predicting,
            targets=packed.targets,
            images=packed.images,
            own=packed.own,
            experts=packed.experts,
            counted=counted,
        )

    def pooled(self, max_tokens: int | None) -> int | None:
        """Return the token budget of all devices that share a sequence, from that of one device."""
        return max_tokens * self.sequence if max_tokens is not None else None

    def collected(self, values: Tensor, row: Row, packed: PackedSequences) -> Tensor:
        """Gather [m] scores of this process's row to all [M] of the packed row, carrying gradient."""
        return values

    def of_all_tokens(self, values: Tensor) -> Tensor:
        """Gather values of the tokens that each process's routers see, [n, ...], to those of the packed row and its padding, on
        the CPU."""
        return values.cpu()

    def over_sequence(self, part: Tensor) -> Tensor:
        """Sum a value over the processes that share a sequence; each carries the gradient of its own part."""
        return part

    def deal(self, parts: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
        """Return this process's micro-batches, equally many on every process; an empty one is run with weight 0."""
        return parts

    def joined(self, values: Tensor, rows: Sequence[int], count: int) -> Tensor:
        """Gather [rows of this process, T] to [count, T], with the rows of all processes in their places."""
        out = values.new_zeros(count, *values.shape[1:])
        out[torch.tensor(list(rows), dtype=torch.int64)] = values
        return out

    def most(self, count: int) -> int:
        """Return the largest of the processes' counts."""
        return count

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sum over all processes."""
        return dict(sums)

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a whole tensor, on the CPU, from its local shard."""
        return tensor.detach().cpu().contiguous()

    def chunks(self, tensors: Mapping[str, Tensor]) -> list[Chunk]:
        """Return the chunks of these tensors that this process writes in a sharded save: every value is written once."""
        return [whole_chunk(name, tensor.detach().cpu()) for name, tensor in tensors.items()] if self.rank == 0 else []

    def shape(self, tensor: Tensor) -> torch.Size:
        """Return the shape of the whole tensor."""
        return tensor.shape

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return the shard of a whole tensor that belongs to this process, placed as ``like``."""
        return tensor.to(like.device)

    def read(self, saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
        """Return ``part`` of a saved tensor. Of files only what belongs to this process is read, where that can be."""
        return self.part(saved[name], like=like)

    def assign(self, parameter: Tensor, value: Tensor) -> None:
        """Set a parameter of a frozen model to a value that ``part`` gave."""
        parameter.copy_(value)

    def weights_changed(self, model: PreTrainedModel) -> None:
        """Drop what a model keeps of its weights besides its parameters, where these change: after ``assign`` or before an
        update."""

    def wait(self) -> None:
        """Wait for all processes (a barrier)."""
