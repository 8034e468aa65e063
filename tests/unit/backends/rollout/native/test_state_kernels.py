"""Compiled layers with states, against the same calculation token by token in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from posttrain.backends.rollout.native.state_kernels import (
    Convolution,
    DeltaRule,
    Parts,
    StateKernels,
    load_state_kernels,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-8}
# Heads of keys and values and their widths: with tails of columns, groups, and all widths of a piece.
SHAPES = [(2, 4, 6, 5), (1, 1, 16, 16), (2, 2, 20, 70), (3, 6, 17, 128), (2, 4, 32, 200)]


def kernels_of(dtype: torch.dtype) -> StateKernels:
    found = load_state_kernels(dtype)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def drawn_rule(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int = 4, bias: bool = False
) -> DeltaRule:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    convolution = Convolution(torch.randn(taps, channels) / 2, torch.randn(channels) if bias else None)
    return DeltaRule(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        decay=torch.rand(value_heads) * 2 + 0.05,
        step_bias=torch.randn(value_heads) * 5,
        norm=torch.randn(value_dim) + 1,
        eps=1e-5,
        share=2.0,
        convolution=convolution,
    )


def rows_for(rule: DeltaRule, tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, rule.channels + rule.value_heads * (rule.value_dim + 2)).to(dtype)


def by_hand(rule: DeltaRule, rows: Tensor, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence. Args: inputs [taps, channels]; state [value_heads, key_dim, value_dim], float64."""
    weights, bias = rule.convolution.weights.double(), rule.convolution.bias
    outputs = []
    for row in rows.double():
        mixed, gate, share, step = row.split(
            [rule.channels, rule.value_heads * rule.value_dim, rule.value_heads, rule.value_heads]
        )
        inputs = torch.cat([inputs[1:], mixed[None]])
        mixed = silu((weights * inputs).sum(0) + (0 if bias is None else bias.double()))
        wide = rule.key_heads * rule.key_dim
        query, key, value = mixed.split([wide, wide, len(mixed) - 2 * wide])
        query, key = (each.view(rule.key_heads, -1) for each in (query, key))
        query, key = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
        query = query / rule.key_dim**0.5
        repeated = rule.value_heads // rule.key_heads
        query, key = (each.repeat_interleave(repeated, 0) for each in (query, key))
        decay = torch.exp(-rule.decay.double() * softplus(step + rule.step_bias.double()))
        state = state * decay[:, None, None]
        change = value.view(rule.value_heads, -1) - torch.einsum("hkv,hk->hv", state, key)
        change = change * (rule.share * share.sigmoid())[:, None]
        state = state + key[:, :, None] * change[:, None]
        read = torch.einsum("hkv,hk->hv", state, query)
        normed = read / (read.square().mean(1, keepdim=True) + rule.eps).sqrt() * rule.norm.double()
        outputs.append((normed * silu(gate.view(rule.value_heads, -1))).flatten())
    return torch.stack(outputs), inputs, state


def states_for(rule: DeltaRule, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    taps, channels = rule.convolution.weights.shape
    shape = slots, rule.value_heads, rule.key_dim, rule.value_dim
    return torch.randn(slots, taps, channels).to(dtype), torch.randn(shape)


def near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert torch.isfinite(got).all()
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_prompts(dtype: torch.dtype, shape: tuple[int, int, int, int], bias: bool) -> None:
    """Parts of 7, 1 and 70 tokens: one begins, one continues its slot, one begins behind another slot's state."""
    torch.manual_seed(0)
    kernels, rule = kernels_of(dtype), drawn_rule(*shape, taps=3 if bias else 4, bias=bias)
    rows = rows_for(rule, 78, dtype)
    inputs, states = states_for(rule, 4, dtype)
    begin = torch.zeros_like(inputs[0]).double(), torch.zeros_like(states[0]).double()
    held = inputs[0].double(), states[0].double()
    parts = Parts(*torch.tensor([[0, 7, 8], [7, 8, 78], [3, 0, 1], [0, 5, 0]]))
    got = kernels.delta_rule(rule, parts, rows, inputs, states)
    for start, end, slot, known in torch.stack(parts[:4]).T.tolist():
        expected, last, state = by_hand(rule, rows[start:end], *(held if known else begin))
        near(got[start:end], expected, TOLERANCE[dtype])
        near(states[slot], state, 2e-5)
        assert torch.equal(inputs[slot].double(), last)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_new_tokens(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Three rows: two begin behind the state of one prompt, one continues its own. A prompt's states stay as they are."""
    torch.manual_seed(0)
    kernels, rule = kernels_of(dtype), drawn_rule(*shape)
    rows, prompts, own = rows_for(rule, 3, dtype), states_for(rule, 2, dtype), states_for(rule, 3, dtype)
    before = [each.clone() for each in (*prompts, *own)]
    numbers = torch.arange(3)
    parts = Parts(numbers, numbers + 1, numbers, torch.tensor([0, 9, 0]), torch.tensor([1, 0, 1]))
    got = kernels.delta_rule(rule, parts, rows, *own, prompts)
    for row, (inputs, states) in enumerate(((before[0][1], before[1][1]), (before[2][1], before[3][1])) * 2):
        if row < 3:
            expected, last, state = by_hand(rule, rows[row : row + 1], inputs.double(), states.double())
            near(got[row], expected[0], TOLERANCE[dtype])
            near(own[1][row], state, 2e-5)
            assert torch.equal(own[0][row].double(), last)
    assert all(map(torch.equal, prompts, before[:2]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_the_others_and_a_prompt_not_on_its_pieces(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels, rule = kernels_of(dtype), drawn_rule(2, 4, 32, 128)
    rows, (inputs, states) = rows_for(rule, 40, dtype), states_for(rule, 40, dtype)
    numbers = torch.arange(40)
    together_states = inputs.clone(), states.clone()
    many = Parts(numbers, numbers + 1, numbers, numbers + 1)
    together = kernels.delta_rule(rule, many, rows, *together_states)
    one = Parts(torch.tensor([0]), torch.tensor([1]), torch.tensor([17]), torch.tensor([3]))
    alone = kernels.delta_rule(rule, one, rows[17:18], inputs, states)
    assert torch.equal(alone[0], together[17])
    assert torch.equal(states[17], together_states[1][17])
    whole_states, cut_states = states_for(rule, 1, dtype), states_for(rule, 1, dtype)
    zero = torch.zeros(1, dtype=torch.int64)
    whole = kernels.delta_rule(rule, Parts(zero, zero + 40, zero, zero), rows, *whole_states)
    cut = [
        kernels.delta_rule(rule, Parts(zero, zero + end - start, zero, zero + start), rows[start:end], *cut_states)
        for start, end in ((0, 3), (3, 5), (5, 40))
    ]
    assert torch.equal(torch.cat(cut), whole)
    assert torch.equal(cut_states[1], whole_states[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("channels", "bias"), [(5, True), (40, False), (300, True)])
def test_short_convolutions(dtype: torch.dtype, channels: int, bias: bool) -> None:
    """Parts of 6 and 1 tokens, one of which begins."""
    torch.manual_seed(0)
    kernels = kernels_of(dtype)
    convolution = Convolution(torch.randn(3, channels), torch.randn(channels) if bias else None)
    rows, inputs = torch.randn(7, 3 * channels).to(dtype), torch.randn(3, 3, channels).to(dtype)
    held = inputs[0].double()
    parts = Parts(*torch.tensor([[0, 6], [6, 7], [2, 0], [0, 4]]))
    got = kernels.short_convolution(convolution, parts, rows, inputs)
    added = 0 if convolution.bias is None else convolution.bias.double()
    for start, end, slot, known in torch.stack(parts[:4]).T.tolist():
        window = held if known else torch.zeros_like(held)
        for row in range(start, end):
            b, c, x = rows[row].chunk(3)
            window = torch.cat([window[1:], (b * x).double()[None]])
            near(got[row], c.double() * ((window * convolution.weights.double()).sum(0) + added), TOLERANCE[dtype])
        assert torch.equal(inputs[slot].double(), window)
