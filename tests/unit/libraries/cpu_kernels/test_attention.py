"""The compiled attention computes softmax(scaling q k') v of what each query sees, and its gradients, in any packed row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from posttrain.libraries.cpu_kernels import build, load
from posttrain.libraries.cpu_kernels.attention import AttentionKernels, difference, load_attention
from posttrain.libraries.cpu_kernels.build import compiled_library
from posttrain.libraries.processor import processor
from posttrain.models.packed_attention import Packed, attend_packed, continued_layout, shared_layout

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
# Products of bfloat16 are of two kinds: on any processor, and by whole numbers where these are faster.
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int16": torch.bfloat16}
DTYPES = pytest.mark.parametrize("dtype", list(KINDS), indirect=True)
GROUPS = st.lists(
    st.tuples(st.integers(1, 70), st.lists(st.integers(0, 40), max_size=4).map(tuple)), min_size=1, max_size=4
)


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run of another test has set, and afterwards again."""
    monkeypatch.setattr(load, "_allowed", True)


@pytest.fixture(scope="module")
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The kernels of one kind, whatever kind is the faster here."""
    if request.param == "int16" and "avx512_vnni" not in processor().split():
        pytest.skip("this processor does not multiply pairs of whole numbers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "multiplies_int16_faster", lambda: request.param == "int16")
        for each in (compiled_library, load_attention):
            each.cache_clear()
        yield KINDS[request.param]
    for each in (compiled_library, load_attention):
        each.cache_clear()


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
    shared = query.shape[1] // key.shape[1]
    query = query.double()
    key, value = (each.double().repeat_interleave(shared, dim=1) for each in (key, value))
    rows: dict[int, Tensor] = {}
    for start, tokens, prompt_start, prompt in layout.spans.tolist():
        before = torch.arange(prompt_start, prompt_start + prompt)
        for token in range(start, start + tokens):
            seen = torch.cat([before, torch.arange(start, token + 1)])[-window if window else None :]
            scores = (key[seen] * query[token]).sum(2) * 0.2  # [seen, heads]
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks[None]])
            rows[token] = (scores.softmax(0)[: len(seen), :, None] * value[seen]).sum(0)
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


@DTYPES
def test_what_is_not_finite_stays_in_its_sequence(dtype: torch.dtype) -> None:
    compiled(dtype)
    states = drawn(60, 1, 2, 16, dtype)
    with torch.no_grad():
        for each in states:
            each[0, :, 25] = torch.nan
    output = attend_packed(*states, shared_layout([(20, ()), (20, ()), (20, ())]), 0.2, None)[0]
    output.backward(torch.ones_like(output))
    for rows in (output, *(each.grad[0].transpose(0, 1) for each in states)):
        assert rows[:20].isfinite().all() and rows[40:].isfinite().all()
        assert rows[25].isnan().all()


@DTYPES
def test_no_bit_depends_on_later_tokens(dtype: torch.dtype) -> None:
    """Rounding of a token's numbers looks at no other token's."""
    compiled(dtype)
    states = [each.detach() for each in drawn(700, 1, 3, 64, dtype)]
    before = attend_packed(*states, shared_layout([(700, ())]), 0.2, None)[0]
    for each in states:
        each[:, :, 301:] = 1e4 * torch.randn(each[:, :, 301:].shape)
    after = attend_packed(*states, shared_layout([(700, ())]), 0.2, None)[0]
    assert torch.equal(before[:301], after[:301]) and not torch.equal(before, after)


@DTYPES
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e12, 1e30])
def test_numbers_of_any_size(dtype: torch.dtype, size: float) -> None:
    """Values of one size, and among them some that are a thousand times larger; keys of the inverse size of the queries."""
    compiled(dtype)
    query, key, value = (each.detach() for each in drawn(200, 2, 2, 48, dtype))
    value[:, :, ::37] *= 1000
    value *= size
    if size:
        query, key = query * size, key / size
    output = attend_packed(query, key, value, shared_layout([(200, ())]), 0.2, None)[0]
    true = exact(*(each[0].transpose(0, 1) for each in (query, key, value)), shared_layout([(200, ())]))
    assert (output.double() - true).norm() <= 0.01 * true.norm()


@pytest.mark.parametrize("dtype", ["int16"], indirect=True)
def test_whole_numbers_are_closer_than_pairs_of_bfloat16(dtype: torch.dtype) -> None:
    """The output and the gradients are nearly as close to the exact ones as rounding them to bfloat16 allows, also of more keys
    than a chunk has."""
    compiled(dtype)
    states = drawn(900, 2, 3, 64, dtype)
    output = attend_packed(*states, shared_layout([(900, ())]), 0.2, None)[0]
    true_states = [each.detach().double().requires_grad_() for each in states]
    query, key, value = true_states
    true = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2, enable_gqa=True)[0].transpose(
        0, 1
    )
    grad = torch.randn(true.shape).to(dtype)
    output.backward(grad)
    true.backward(grad.double())
    for ours, exactly in [(output, true), *((a.grad, b.grad) for a, b in zip(states, true_states, strict=True))]:
        rounding = (exactly.to(dtype).double() - exactly).norm()
        assert rounding < (ours.double() - exactly).norm() <= 1.03 * rounding


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
