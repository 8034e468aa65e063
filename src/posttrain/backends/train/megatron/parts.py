"""A sharded model: megatron's GPT on this rank, and the Hugging Face model that all parts together form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.backends.train.megatron.adapters import put_adapters
from posttrain.backends.train.megatron.model import build, head_dim, vocabulary
from posttrain.backends.train.megatron.sharding import MegatronSharding
from posttrain.backends.train.megatron.weights import (
    ADAPTERS,
    OF_EXPERTS,
    Heads,
    Piece,
    Read,
    chunks_of_piece,
    join_piece,
    piece_of,
    read_piece,
)
from posttrain.backends.train.megatron.without_cuda import on_this_machine
from posttrain.errors import ModelError, Problem
from posttrain.models.chunks import Chunk, part_of
from posttrain.models.value_head import HEADS
from posttrain.plan.engines.megatron.models import unsupported

T = TypeVar("T")


class ModelParts:
    """Extracts its own part of a Hugging Face model's weights. ``release`` then frees them: the model stays as a shell.

    Raises: ModelError for a model that megatron-core's layers, as combined here, do not compute.
    """

    def __init__(self, source: PreTrainedModel, sharding: MegatronSharding, *, recompute: bool = False):
        self.sharding = sharding
        reason = unsupported(source.config.get_text_config().to_dict())
        if reason:
            fix = "choose a Llama, Mistral, Mixtral, Qwen2 or Qwen3 model, or the engine fsdp"
            raise ModelError(Problem(f"{source.name_or_path}: {reason}", fix=fix, field="model.path"))
        text = source.config.get_text_config()
        self.heads = Heads(
            key_value=text.num_key_value_heads,
            per_group=text.num_attention_heads // text.num_key_value_heads,
            dim=head_dim(text),
        )
        self.vocabulary = vocabulary(source)
        # Name of a critic's head.
        self.value_head = next((name for name in HEADS if hasattr(source, name)), None)
        self.tied = bool(text.tie_word_embeddings) and self.value_head is None
        with on_this_machine():
            self.stretches = build(source, sharding, recompute=recompute, tied=self.tied, value_head=self.value_head)
            put_adapters(self.stretches, source, self.heads, sharding)
        self.shell = source
        self.whole_shapes = {name: tuple(weight.shape) for name, weight in source.named_parameters()}
        # All, or an adapter
        self.trained = [name for name, weight in source.named_parameters() if weight.requires_grad]
        self.gpt = nn.ModuleList(self.stretches)
        self.pieces = {self._name(name): parameter for name, parameter in self.gpt.named_parameters()}
        parts = self.cut(dict(source.named_parameters()))
        for name, parameter in self.pieces.items():
            parameter.data.copy_(parts[name])
            parameter.requires_grad_(set(self._piece(name).sources) <= set(self.trained))
        self._owners = self._find_owners()

    @property
    def head(self) -> Tensor:
        """Return this rank's rows of the output layer, [V / R, H], on the last stage."""
        last = self.stretches[-1]
        own: Tensor | None = last.output_layer.weight
        weight: Tensor = last.embedding.word_embeddings.weight if own is None else own
        return weight

    @property
    def _share_one_expert(self) -> int:
        return self.sharding.settings.experts.split(self.sharding.tensor)[1]

    def release(self) -> None:
        """Free the whole weights."""
        self.shell.to("meta")  # type: ignore[arg-type]  # transformers hides the method's type behind a wrapper
        self.shell.tie_weights()

    @torch.no_grad()
    def cut(self, tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Extract this rank's part of whole tensors, which alone is read of files, by names of ``pieces``: of all or these."""
        wanted = self.pieces if names is None else names
        return {name: self.read(name, partial(part_of, tensors)) for name in wanted}

    @torch.no_grad()
    def read(self, name: str, read: Read, entries: slice = slice(None)) -> Tensor:
        """Read this rank's part of a piece from saved tensors, or these entries of its first dimension."""
        piece = self._piece(name)
        shapes = [self.whole_shapes[source] for source in piece.sources]
        rank, ranks, experts = self._place(piece, shapes)
        return read_piece(piece, read, self.heads, shapes, rank, ranks, experts=experts, entries=entries)

    def _place(self, piece: Piece, shapes: Sequence[tuple[int, ...]]) -> tuple[int, int, range]:
        """Return this rank's number among those that share a piece, how many these are, and the experts that they have."""
        if piece.cut not in OF_EXPERTS:
            return self.sharding.tensor_group.rank(), self.sharding.tensor, range(0)
        ranks = self._share_one_expert
        which, rank = divmod(self.sharding.experts_group.rank(), ranks)
        count = shapes[0][0] // self.sharding.settings.experts.parallel
        return rank, ranks, range(which * count, (which + 1) * count)

    @torch.no_grad()
    def whole(
        self, parts: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, *, frozen: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole tensors, in the shell's order, from every rank's parts by names of ``pieces``:
        the trained weights, or the frozen ones, too.

        A collective call of all ranks; each gets everything.
        """
        waiting: dict[str, Tensor] = {}
        for name in self.whole_shapes if frozen else self.trained:
            if name not in waiting:
                piece = self._owners[name][0]
                waiting |= zip(piece.sources, self._gathered(piece, parts.get(piece.name), dtype), strict=True)
            yield name, waiting.pop(name)

    def chunks(self, parts: Mapping[str, Tensor], *, prefix: str = "") -> list[Chunk]:
        """Return the chunks this rank writes in a sharded save: every value of the whole tensors is written by one rank.

        Args: parts by the names of ``pieces``; prefix of the names in the files.
        """
        found = []
        for name, part in parts.items():
            if not self.holds_alone(name) or self.copies_of(name).rank() != 0:
                continue
            piece = self._piece(name)
            shapes = [self.whole_shapes[source] for source in piece.sources]
            rank, ranks, experts = self._place(piece, shapes)
            first = experts.start
            for chunk in chunks_of_piece(piece, part.detach(), self.heads, shapes, rank, ranks, first_expert=first):
                found.append(Chunk(prefix + chunk.name, chunk.offsets, chunk.tensor.cpu()))
        return found

    def copies_of(self, name: str) -> dist.ProcessGroup:
        """Return the group of ranks that hold the same part of the same weight."""
        return self.sharding.expert_copies_group if self.of_experts(name) else self.sharding.copies_group

    def by_piece(self, values: Mapping[str, T]) -> dict[str, T]:
        """Map values from names of ``gpt``'s parameters to those of ``pieces``."""
        local = (name for name, _ in self.gpt.named_parameters())
        return {piece: values[name] for piece, name in zip(self.pieces, local, strict=True) if name in values}

    def by_parameter(self, values: Mapping[str, T]) -> dict[str, T]:
        """Map values from names of ``pieces`` to those of ``gpt``'s parameters."""
        local = (name for name, _ in self.gpt.named_parameters())
        return {name: values[piece] for piece, name in zip(self.pieces, local, strict=True) if piece in values}

    def holds_alone(self, name: str) -> bool:
        """Return True when this rank counts its part of a piece, among all ranks of its copy: replicated parts are counted on the
        first rank only."""
        piece = self._piece(name)
        if self.tied and name == "output_layer.weight":
            return False  # counted with the embedding
        return piece.cut != "whole" or self.sharding.tensor_group.rank() == 0

    def of_experts(self, name: str) -> bool:
        """Return True for a piece sharded like experts, over ranks that read different tokens."""
        return self._piece(name).cut in OF_EXPERTS

    def added_over_tensor_ranks(self, name: str) -> bool:
        """Return True when a weight replicated on tensor-parallel ranks has partial gradients: norms on queries and keys see
        only this rank's heads, and with sequence parallelism all norms see only this rank's tokens. A value head sees
        everything on each rank."""
        if name.startswith("output_layer."):
            return False
        alone = self.sharding.sequence_parallel or "q_layernorm" in name or "k_layernorm" in name
        return (alone or self._of_split_groups(name)) and self._piece(name).cut == "whole"

    def _of_split_groups(self, name: str) -> bool:
        """Return True for an adapter's B of queries, keys or values whose groups are split over ranks (adapters.Adapters)."""
        split = self.sharding.tensor > self.heads.key_value
        return split and f"linear_qkv.{ADAPTERS}." in name and name.endswith("_B")

    def _name(self, local: str) -> str:
        """Return the name with the number of the layer in the whole model, instead of that in the stage."""
        stretch, local = local.split(".", 1)
        if not local.startswith("decoder.layers."):
            return local
        _, _, number, within = local.split(".", 3)
        layer = self.stretches[int(stretch)].decoder.layers[int(number)]
        return f"decoder.layers.{layer.layer_number - 1}.{within}"

    def _piece(self, name: str) -> Piece:
        if self.value_head is not None and name.startswith("output_layer."):
            return Piece(name, "whole", (name.replace("output_layer", self.value_head),))
        if self.tied and name == "output_layer.weight":
            piece = Piece(name, "rows", piece_of("embedding.word_embeddings.weight").sources)
        else:
            piece = piece_of(name)
        if self._of_split_groups(name):
            piece = replace(piece, cut="whole")
        return replace(piece, sources=tuple(self._in_shell(source) for source in piece.sources))

    def _in_shell(self, source: str) -> str:
        """Return a weight's name in a model some of whose layers peft has wrapped with adapters."""
        if source in self.whole_shapes:
            return source
        layer, _, kind = source.rpartition(".")
        return f"{layer}.base_layer.{kind}"

    def _find_owners(self) -> dict[str, tuple[Piece, int]]:
        """Return the piece of each Hugging Face tensor, and the stage that holds it (the first of two)."""
        stages: list[list[str]] = [[] for _ in range(self.sharding.pipeline)]
        dist.all_gather_object(stages, list(self.pieces), group=self.sharding.pipeline_group)
        owners: dict[str, tuple[Piece, int]] = {}
        for stage, names in enumerate(stages):
            for name in names:
                piece = self._piece(name)
                for source in piece.sources:
                    owners.setdefault(source, (piece, stage))
        lost = [name for name in self.whole_shapes if name not in owners]
        if lost:
            what = f"{self.shell.name_or_path}: megatron's layers have no place for {lost[0]}"
            raise ModelError(Problem(what, fix="use the engine fsdp", field="model.path"))
        return owners

    def _gathered(self, piece: Piece, part: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
        """Gather the tensors of a piece, on every rank of every stage."""
        group, stage = self.sharding.pipeline_group, self._owners[piece.sources[0]][1]
        shapes = [self.whole_shapes[source] for source in piece.sources]
        if group.rank() == stage:
            assert part is not None
            of_experts = piece.cut in OF_EXPERTS
            within = self.sharding.experts_group if of_experts else self.sharding.tensor_group
            parts = [torch.empty_like(part) for _ in range(within.size())]
            dist.all_gather(parts, part.detach().contiguous(), group=within)
            if of_experts:
                one = self._share_one_expert
                each_rank = [parts[first : first + one] for first in range(0, len(parts), one)]
                joined = [torch.cat([join_piece(piece.cut, of_one, self.heads, shapes)[0] for of_one in each_rank])]
            else:
                joined = join_piece(piece.cut, parts, self.heads, shapes)
            found = [each.to(dtype) for each in joined]
        else:
            found = [torch.empty(shape, dtype=dtype, device=self.sharding.device) for shape in shapes]
        if self.sharding.pipeline > 1:
            source_rank = dist.get_global_rank(group, stage)
            for tensor in found:
                dist.broadcast(tensor, source_rank, group=group)
        return found
