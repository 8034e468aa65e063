"""The compiled attention computes softmax(scaling q k') v of what each query sees, and its gradients, in any packed row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.libraries.cpu_kernels import load
from posttrain.libraries.cpu_kernels.attention import AttentionKernels, difference, load_attention
from posttrain.models.packed_attention import Packed, attend_packed, continued_layout, shared_layout

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
DTYPES = pytest.mark.parametrize("dtype", list(CLOSE))
GROUPS = st.lists(
    st.tuples(st.integers(1, 70), st.lists(st.integers(0, 40), max_size=4).map(tuple)), min_size=1, max_size=4
)


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run of another test has set, and afterwards again."""
    monkeypatch.setattr(load, "_allowed", True)


def compiled(dtype: torch.dtype) -> AttentionKernels:
    found = load_attention(dtype)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Packed,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query after the other, in float64: [n, heads, dim]."""
    query, key, value = query.double(), key.double(), value.double()
    shared = query.shape[1] // key.shape[1]
    rows: dict[int, Tensor] = {}
    for start, tokens, prompt_start, prompt in layout.spans.tolist():
        before = torch.arange(prompt_start, prompt_start + prompt)
        for token in range(start, start + tokens):
            seen = torch.cat([before, torch.arange(start, token + 1)])[-window if window else None :]
            heads = []
            for head in range(query.shape[1]):
                scores = key[seen, head // shared] @ query[token, head] * 0.2
                scores = softcap * (scores / softcap).tanh() if softcap else scores
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                heads.append(scores.softmax(0)[: len(seen)] @ value[seen, head // shared])
            rows[token] = torch.stack(heads)
    return torch.stack([rows[token] for token in range(len(rows))])


def drawn(tokens: int, kv_heads: int, shared: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(tokens)
    sizes = (kv_heads * shared, kv_heads, kv_heads)
    return [torch.randn(1, heads, tokens, dim).to(dtype).requires_grad_() for heads in sizes]


@DTYPES
@given(
    groups=GROUPS,
    heads=st.sampled_from([(1, 1), (2, 3), (1, 7)]),
    dim=st.sampled_from([16, 48, 64, 80]),
    window=st.sampled_from([None, 1, 9, 50]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    sink=st.sampled_from([None, None, -2.0, 30.0]),
)
@settings(max_examples=15, deadline=None)
def test_values_and_gradients(
    dtype: torch.dtype,
    groups: list[tuple[int, tuple[int, ...]]],
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    softcap: float,
    sink: float | None,
) -> None:
    compiled(dtype)
    layout = shared_layout(groups)
    states = drawn(sum(prompt + sum(responses) for prompt, responses in groups), *heads, dim, dtype)
    if sink is not None:
        states.append(torch.full((heads[0] * heads[1],), sink, dtype=dtype).requires_grad_())
    output = attend_packed(*states[:3], layout, 0.2, window, softcap or None, *states[3:])[0]
    assert load.attention_for(*(each[0].transpose(0, 1) for each in states[:3])) is not None
    true_states = [each.detach().double().requires_grad_() for each in states]
    true = exact(*(each[0].transpose(0, 1) for each in true_states[:3]), layout, window, softcap, *true_states[3:])
    grad = torch.randn(true.shape).to(dtype)
    output.backward(grad)
    true.backward(grad.double())
    for ours, theirs in [(output, true), *((a.grad, b.grad) for a, b in zip(states, true_states, strict=True))]:
        assert (ours.double() - theirs).norm() <= CLOSE[dtype] * theirs.norm() + 1e-6


@DTYPES
def test_keys_of_cached_tokens(dtype: torch.dtype) -> None:
    """Their keys and values follow those of the whole row: 5 known tokens before 3, and 2 alone."""
    compiled(dtype)
    layout = continued_layout([(5, 3), (0, 2)])
    query, key, value = (each.detach() for each in drawn(10, 2, 2, 32, dtype))
    query = query[:, :, :5]
    found = attend_packed(query, key, value, layout, 0.2, None)[0]
    true = exact(*(each[0].transpose(0, 1) for each in (query, key, value)), layout)
    assert (found.double() - true).norm() <= CLOSE[dtype] * true.norm()


@DTYPES
def test_no_bit_depends_on_the_number_of_threads(dtype: torch.dtype) -> None:
    compiled(dtype)
    layout = shared_layout([(70, (30, 9, 41)), (300, ())])
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            states = drawn(450, 2, 3, 64, dtype)
            output = attend_packed(*states, layout, 0.2, None)
            output.float().square().sum().backward()
            found.append([output, *(each.grad for each in states)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, same) for one, same in zip(found[0], other, strict=True))


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    compiled(torch.float32)
    states = drawn(60, 1, 2, 16, torch.float32)
    with torch.no_grad():
        for each in states:
            each[0, :, 25] = torch.nan
    output = attend_packed(*states, shared_layout([(20, ()), (20, ()), (20, ())]), 0.2, None)[0]
    output.backward(torch.ones_like(output))
    for rows in (output, *(each.grad[0].transpose(0, 1) for each in states)):
        assert rows[:20].isfinite().all() and rows[40:].isfinite().all()


@DTYPES
def test_a_pass_that_differs_is_found(dtype: torch.dtype) -> None:
    """The comparison at the start can fail: with gradients of keys that are a percent too large, or a window that is ignored."""
    kernels = compiled(dtype)
    assert difference(kernels) == ""

    class Larger(AttentionKernels):
        def backward(self, *given: object) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            of_query, of_key, of_value, of_sinks = super().backward(*given)  # type: ignore[arg-type]
            return of_query, of_key * 1.01, of_value, of_sinks

    class Blind(AttentionKernels):
        def forward(self, *given: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            *states, settings = given
            return super().forward(*states, settings._replace(window=None))  # type: ignore[arg-type,attr-defined]

    for kind, name in ((Larger, "gradient of keys"), (Blind, "output")):
        other = object.__new__(kind)
        other.__dict__.update(kernels.__dict__)
        assert difference(other) == f"the compiled attention gives another {name} than torch"


def test_widths_that_are_no_multiple_of_a_vector_take_products() -> None:
    states = drawn(9, 1, 2, 24, torch.float32)
    assert load.attention_for(*(each[0].transpose(0, 1) for each in states)) is None
    assert attend_packed(*states, shared_layout([(9, ())]), 0.2, None).shape == (1, 9, 2, 24)
