"""Weights into megatron's layout and back: by hand, and exactly for every family and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from posttrain.backends.train.megatron.weights import (
    Heads,
    Piece,
    chunks_of_piece,
    cut_piece,
    join_piece,
    piece_of,
    read_piece,
)
from posttrain.models.chunks import part_of
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import Family, write_tiny_model

pytestmark = pytest.mark.slow  # megatron-core takes five seconds to import
ONE = Heads(key_value=1, per_group=1, dim=1)
LAYERS = range(2)  # of the tiny model


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers)[:, None]


def test_queries_keys_and_values_stand_group_by_group() -> None:
    # 4 query heads of size 1 (1..4) on 2 key heads (5, 6) and 2 value heads (7, 8): q1 q2 k1 v1 | q3 q4 k2 v2
    heads = Heads(key_value=2, per_group=2, dim=1)
    sources = [column(1, 2, 3, 4), column(5, 6), column(7, 8)]
    assert cut_piece("heads", sources, heads, 0, 1).flatten().tolist() == [1, 2, 5, 7, 3, 4, 6, 8]
    assert cut_piece("heads", sources, heads, 1, 2).flatten().tolist() == [3, 4, 6, 8]
    # More ranks than groups: megatron gathers the rows of a group again.
    assert cut_piece("heads", sources, heads, 1, 4).flatten().tolist() == [5, 7]


def test_gate_and_up_are_halved_each() -> None:
    sources = [column(1, 2, 3, 4), column(5, 6, 7, 8)]
    assert cut_piece("stacked", sources, ONE, 0, 2).flatten().tolist() == [1, 2, 5, 6]
    assert cut_piece("stacked", sources, ONE, 1, 2).flatten().tolist() == [3, 4, 7, 8]


def test_a_vocabulary_is_filled_up() -> None:
    # 3 rows over 2 ranks: 2 and 1, and one of zeros
    parts = [cut_piece("rows", [column(1, 2, 3)], ONE, rank, 2) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[1, 2], [3, 0]]
    assert join_piece("rows", parts, ONE, [(3, 1)])[0].flatten().tolist() == [1, 2, 3]


def test_experts_are_cut_one_by_one() -> None:
    # Two experts of width 2: gates 1 2, ups 3 4, and gates 5 6, ups 7 8. A rank of two has half of every gate and every up.
    gate_up = torch.stack([column(1, 2, 3, 4), column(5, 6, 7, 8)])
    first, second = (cut_piece("stacked experts", [gate_up], ONE, rank, 2) for rank in range(2))
    assert first.flatten(1).tolist() == [[1, 3], [5, 7]] and second.flatten(1).tolist() == [[2, 4], [6, 8]]
    (back,) = join_piece("stacked experts", [first, second], ONE, [gate_up.shape])
    assert torch.equal(back, gate_up)
    down = torch.stack([torch.tensor([[1.0, 2]]), torch.tensor([[3.0, 4]])])  # [2 experts, 1, width 2]
    parts = [cut_piece("column experts", [down], ONE, rank, 2) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[1, 3], [2, 4]]
    assert torch.equal(join_piece("column experts", parts, ONE, [down.shape])[0], down)


def test_where_the_rows_of_a_rank_lie() -> None:
    # As above, q1 q2 k1 v1 | q3 q4 k2 v2: the second of two ranks has rows 2 and 3 of the queries, 1 of keys and of values.
    heads = Heads(key_value=2, per_group=2, dim=1)
    piece = Piece("qkv", "heads", ("q", "k", "v"))
    chunks = chunks_of_piece(piece, column(3, 4, 6, 8), heads, [(4, 1), (2, 1), (2, 1)], 1, 2)
    assert [(each.name, each.offsets, each.tensor.flatten().tolist()) for each in chunks] == [
        ("q", (2, 0), [3, 4]), ("k", (1, 0), [6]), ("v", (1, 0), [8])
    ]  # fmt: skip
    # 3 rows over 4 ranks: the last has filling alone.
    assert chunks_of_piece(Piece("vocabulary", "rows", ("rows",)), column(0), heads, [(3, 1)], 3, 4) == []
    # Experts 4 and 5, width 4: the second of two ranks has half of every gate and of every up projection.
    part = torch.arange(8.0).view(2, 4, 1)
    found = chunks_of_piece(
        Piece("experts", "stacked experts", ("both",)), part, ONE, [(8, 8, 1)], 1, 2, first_expert=4
    )
    assert [each.offsets for each in found] == [(4, 2, 0), (4, 6, 0)]


def test_a_parameter_that_is_in_no_table() -> None:
    with pytest.raises(KeyError, match="expert_bias"):
        piece_of("decoder.layers.0.mlp.router.expert_bias")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral"])
def test_there_and_back(tmp_path: Path, family: Family, ranks: int) -> None:
    model = load_causal_lm(str(write_tiny_model(tmp_path, family)), dtype=torch.float32)
    weights = dict(model.named_parameters())
    heads = Heads(key_value=2, per_group=2, dim=8)
    layer = [
        "input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        *(["self_attention.linear_qkv.bias"] if family in ("qwen2", "qwen2_moe") else []),
        *(["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] if "qwen3" in family else []),
    ]  # fmt: skip
    mixed = ["mlp.router.weight", "mlp.experts.gate_up", "mlp.experts.down"]
    shared = [f"mlp.shared_experts.{name}" for name in ("linear_fc1.weight", "linear_fc2.weight", "gate_weight")]
    plain = ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    mlps = {"qwen3_moe": [mixed] * 2, "mixtral": [mixed] * 2, "qwen2_moe": [plain, mixed + shared]}.get(
        family, [plain] * 2
    )
    names = [f"decoder.layers.{number}.{name}" for number in LAYERS for name in layer + mlps[number]]
    names += ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    names += ["output_layer.weight"] if family != "llama" else []  # tied in llama
    back: dict[str, Tensor] = {}
    chunked = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    written = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for name in names:
        piece = piece_of(name)
        sources = [weights[source] for source in piece.sources]
        parts = [cut_piece(piece.cut, sources, heads, rank, ranks) for rank in range(ranks)]
        assert len({part.shape for part in parts}) == 1
        shapes = [tuple(one.shape) for one in sources]
        for rank, part in enumerate(parts):
            assert_read(piece, weights, part, heads, shapes, rank, ranks)
        back |= zip(piece.sources, join_piece(piece.cut, parts, heads, shapes), strict=True)
        for rank, part in enumerate(parts[:1] if piece.cut == "whole" else parts):
            for chunk in chunks_of_piece(piece, part, heads, shapes, rank, ranks):
                sizes = zip(chunk.offsets, chunk.tensor.shape, strict=True)
                box = tuple(slice(first, first + size) for first, size in sizes)
                chunked[chunk.name][box] = chunk.tensor
                written[chunk.name][box] += 1
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())
    assert all(torch.equal(chunked[name], weight) for name, weight in weights.items())
    assert all((times == 1).all() for times in written.values())


def assert_read(
    piece: Piece, weights: dict[str, Tensor], part: Tensor, heads: Heads, shapes: Any, rank: int, ranks: int
) -> None:
    """Read from files, the part is the one that is cut from whole tensors, and nothing besides it is read."""
    values = 0

    def read(name: str, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
        nonlocal values
        found = part_of(weights, name, offsets, size)
        assert found.shape == tuple(size)
        values += found.numel()
        return found

    everyone = range(shapes[0][0]) if len(shapes[0]) == 3 else range(0)
    entries = len(part) // 2 + 1, len(part)
    for first, end in ((0, len(part)), entries, (len(part), len(part))):
        values = 0
        mine = slice(first, end)
        found = read_piece(piece, read, heads, shapes, rank, ranks, experts=everyone, entries=mine)
        assert torch.equal(found, part[mine])
        assert values <= part[mine].numel()


def test_experts_of_a_rank_are_read() -> None:
    both = torch.arange(8.0 * 8).view(8, 8, 1)
    asked = []

    def read(name: str, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
        asked.append((tuple(offsets), tuple(size)))
        return part_of({"both": both}, name, offsets, size)

    piece = Piece("experts", "stacked experts", ("both",))
    # Experts 4 to 7, of which the second of two ranks has the second halves of gate and up projection; the last two of them.
    found = read_piece(piece, read, ONE, [(8, 8, 1)], 1, 2, experts=range(4, 8), entries=slice(2, 4))
    assert asked == [((6, 2, 0), (2, 2, 1)), ((6, 6, 0), (2, 2, 1))]
    assert torch.equal(found, cut_piece("stacked experts", [both[4:8]], ONE, 1, 2)[2:])
