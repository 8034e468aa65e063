"""Mapping between Hugging Face weights and megatron-core's, and their sharding over tensor-parallel ranks.

Megatron keeps queries, keys and values in one matrix, group after group (the queries of a key/value head, its key, its value:
q q k v | q q k v | ...), and the gate of an MLP above its up projection. Rank r of R has the r-th part of the fused rows, of
the gate and of the up projection, and of the vocabulary, which is filled up with zeros to a multiple of R. Projections back to
the hidden size are cut along their inputs; norms and routers are whole everywhere. Experts are dealt out over ranks that share
them, consecutive ones to each, and every expert's matrices are cut over the ranks that share one expert as those of an MLP are.
For models of the Llama kind: Llama, Mistral without a window, Mixtral, Qwen2 and Qwen3 with experts or without, which differ in
biases on queries, keys and values, in norms on queries and keys, and in an expert that all tokens share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.models.chunks import Chunk, whole_chunk
from posttrain.models.lora import ADAPTER

Cut = Literal["whole", "rows", "columns", "stacked", "heads", "stacked experts", "column experts"]
OF_EXPERTS: tuple[Cut, ...] = ("stacked experts", "column experts")
ADAPTABLE: tuple[Cut, ...] = ("heads", "stacked", "columns")  # shardings of matrices that support LoRA adapters
# Name of a saved tensor, offsets and size of a part of it -> its values
Read = Callable[[str, Sequence[int], Sequence[int]], Tensor]
ADAPTERS = "adapters"  # name of a parallel layer's adapters within it

# Name in megatron's layer -> names in Hugging Face's layer, and the sharding. A model may lack parameters of this table.
LAYER: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "input_layernorm.weight": ("whole", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (
        "heads",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    "self_attention.linear_qkv.bias": (
        "heads",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    ),
    "self_attention.q_layernorm.weight": ("whole", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("whole", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("stacked", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
    "mlp.router.weight": ("whole", ("mlp.gate.weight",)),
    "mlp.experts.gate_up": ("stacked experts", ("mlp.experts.gate_up_proj",)),
    "mlp.experts.down": ("column experts", ("mlp.experts.down_proj",)),
    "mlp.shared_experts.linear_fc1.weight": (
        "stacked",
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    ),
    "mlp.shared_experts.linear_fc2.weight": ("columns", ("mlp.shared_expert.down_proj.weight",)),
    "mlp.shared_experts.gate_weight": ("whole", ("mlp.shared_expert_gate.weight",)),
}
# Weights outside of layers.
OUTER: dict[str, tuple[Cut, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("rows", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("whole", ("model.norm.weight",)),
    "output_layer.weight": ("rows", ("lm_head.weight",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Composition of the fused matrix of an attention layer."""

    key_value: int  # heads; as many groups
    per_group: int  # query heads of a key/value head
    dim: int  # per head


@dataclass(frozen=True, slots=True)
class Piece:
    """One whole parameter of megatron's: its name (with the layer's number in the model), and its Hugging Face sources."""

    name: str
    cut: Cut
    sources: tuple[str, ...]  # in the Hugging Face model


def piece_of(name: str) -> Piece:
    """Return the piece of megatron's parameter ``name``. Raises: KeyError for an unknown parameter."""
    if name in OUTER:
        return Piece(name, *OUTER[name])
    _, _, number, within = name.split(".", 3)  # decoder.layers.N.
    cut, sources = _of_adapters(within) if f".{ADAPTERS}." in within else LAYER[within]
    return Piece(name, cut, tuple(f"model.layers.{number}.{source}" for source in sources))


def _of_adapters(within: str) -> tuple[Cut, tuple[str, ...]]:
    """Return the table row of a parameter of adapters.Adapters, such as self_attention.linear_qkv.adapters.q_proj_A."""
    parallel, _, which = within.partition(f".{ADAPTERS}.")
    cut, names = LAYER[f"{parallel}.weight"]
    short, side = which.rsplit("_", 1)
    layer = next(name for name in names if name.endswith(f".{short}.weight")).removesuffix(".weight")
    cut_as: Cut = "whole"
    if cut == "columns" and side == "A":
        cut_as = "columns"
    elif cut != "columns" and side == "B":
        cut_as = "rows"
    return cut_as, (f"{layer}.lora_{side}.{ADAPTER}.weight",)


def cut_piece(cut: Cut, sources: Sequence[Tensor], heads: Heads, rank: int, ranks: int) -> Tensor:
    """Extract the part of rank ``rank`` from the Hugging Face tensors of a piece. The caller checks that sizes divide; only the
    vocabulary is padded. Of experts: from those that the rank's neighbours share with it, [E, rows, columns]."""
    if cut == "whole":
        return sources[0]
    if cut == "columns":
        return sources[0].chunk(ranks, dim=1)[rank]
    if cut == "rows":
        rows = -(-len(sources[0]) // ranks)
        part = sources[0][rank * rows : (rank + 1) * rows]
        return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
    if cut == "stacked":
        return torch.cat([source.chunk(ranks)[rank] for source in sources])
    if cut == "stacked experts":
        return torch.cat([half.chunk(ranks, dim=1)[rank] for half in sources[0].chunk(2, dim=1)], dim=1)
    if cut == "column experts":
        return sources[0].chunk(ranks, dim=2)[rank]
    grouped = [source.view(heads.key_value, -1, *source.shape[1:]) for source in sources]
    return torch.cat(grouped, dim=1).flatten(0, 1).chunk(ranks)[rank]


def read_piece(
    piece: Piece,
    read: Read,
    heads: Heads,
    shapes: Sequence[tuple[int, ...]],
    rank: int,
    ranks: int,
    *,
    experts: range = range(0),
    entries: slice = slice(None),
) -> Tensor:
    """Return what ``cut_piece`` gives rank ``rank``, of saved tensors of these shapes; read is little more than that.

    Args: experts that the rank's neighbours share with it, of experts; entries of the part's first dimension.
    """
    name, shape = piece.sources[0], shapes[0]
    if piece.cut in OF_EXPERTS:
        mine = experts[entries]
        if piece.cut == "column experts":
            columns = shape[2] // ranks
            return read(name, (mine.start, 0, rank * columns), (len(mine), shape[1], columns))
        rows = shape[1] // 2 // ranks
        begins = (rank * rows, shape[1] // 2 + rank * rows)
        return torch.cat([read(name, (mine.start, begin, 0), (len(mine), rows, shape[2])) for begin in begins], dim=1)
    if piece.cut in ("whole", "columns"):
        here = range(shape[0])[entries]
        width = () if piece.cut == "whole" else (shape[1] // ranks,)
        first = tuple(rank * columns for columns in width)
        rest = shape[1 + len(width) :]
        return read(name, (here.start, *first, *[0] * len(rest)), (len(here), *width, *rest))
    numbers = _row_numbers(shapes)
    wanted = cut_piece(piece.cut, numbers, heads, rank, ranks)[entries]
    found: Tensor | None = None
    for source, of_source, source_shape in zip(piece.sources, numbers, shapes, strict=True):
        mask = (wanted >= of_source[0]) & (wanted <= of_source[-1])
        if mask.any():
            of_rank = wanted[mask] - of_source[0]
            begin, end = int(of_rank.min()), int(of_rank.max()) + 1
            read_rows = read(source, (begin, *[0] * (len(shape) - 1)), (end - begin, *source_shape[1:]))
            if found is None:
                found = read_rows.new_zeros(len(wanted), *shape[1:])
            found[mask] = read_rows[of_rank - begin]
    return torch.zeros(len(wanted), *shape[1:]) if found is None else found


def chunks_of_piece(
    piece: Piece,
    part: Tensor,
    heads: Heads,
    shapes: Sequence[tuple[int, ...]],
    rank: int,
    ranks: int,
    *,
    first_expert: int = 0,
) -> list[Chunk]:
    """Locate the part that ``cut_piece`` gives rank ``rank`` in the Hugging Face tensors of a piece, of these shapes.

    Args: first_expert of the part, of experts.
    """
    name = piece.sources[0]
    if piece.cut == "whole":
        return [whole_chunk(name, part)]
    if piece.cut == "columns":
        return [Chunk(name, (0, rank * part.shape[1]), part)]
    if piece.cut == "column experts":
        return [Chunk(name, (first_expert, 0, rank * part.shape[2]), part)]
    if piece.cut == "stacked experts":
        rows = part.shape[1] // 2
        begins = (rank * rows, shapes[0][1] // 2 + rank * rows)
        halves = zip(begins, part.chunk(2, dim=1), strict=True)
        return [Chunk(name, (first_expert, begin, 0), half) for begin, half in halves]
    # The others are cut by rows. Cutting the rows' numbers shows the place of each; padding is 0.
    numbers = _row_numbers(shapes)
    here = cut_piece(piece.cut, numbers, heads, rank, ranks).to(part.device)
    found = []
    for source, of_source in zip(piece.sources, numbers, strict=True):
        first, last = int(of_source[0]), int(of_source[-1])
        mine = (here >= first) & (here <= last)
        if mine.any():
            offsets = (int(here[mine][0]) - first, *[0] * (part.dim() - 1))
            found.append(Chunk(source, offsets, part[mine]))
    return found


def _row_numbers(shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """Return the numbers of all rows of tensors of these shapes, from 1: 0 is padding."""
    counts = [shape[0] for shape in shapes]
    return torch.arange(1, 1 + sum(counts)).split(counts)


def join_piece(
    cut: Cut, parts: Sequence[Tensor], heads: Heads, shapes: Sequence[torch.Size | tuple[int, ...]]
) -> list[Tensor]:
    """Join the parts of all ranks to the Hugging Face tensors, of these shapes."""
    if cut == "whole":
        return [parts[0]]
    if cut == "columns":
        return [torch.cat(list(parts), dim=1)]
    if cut == "rows":
        return [torch.cat(list(parts))[: shapes[0][0]]]
    if cut == "stacked":
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return [torch.cat(half) for half in halves]
    if cut == "stacked experts":
        halves = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
        return [torch.cat([part for half in halves for part in half], dim=1)]
    if cut == "column experts":
        return [torch.cat(list(parts), dim=2)]
    whole = torch.cat(list(parts))
    grouped = whole.view(heads.key_value, -1, *whole.shape[1:])
    sizes = [heads.per_group * heads.dim, heads.dim, heads.dim]
    return [each.flatten(0, 1).contiguous() for each in grouped.split(sizes, dim=1)]
