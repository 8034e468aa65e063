"""The compiled kernels compute what torch's operations compute, and sampling goes on where they cannot be made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

from posttrain.backends.rollout.native import kernels as kernels_module
from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.kernel_parts import FORMULAS
from posttrain.backends.rollout.native.kernels import (
    ActivationKind,
    GateForm,
    GateKind,
    Kernels,
    PassKernels,
    Turn,
    load_kernels,
)
from posttrain.backends.rollout.native.rounded_prompts import RoundingKernel
from posttrain.backends.rollout.native.slots import LENGTH_STEP, Slots, TiledSlots
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.backends.rollout.native.trial import fast_pass
from posttrain.libraries.cpu_kernels import build as build_module
from posttrain.libraries.cpu_kernels.update import NormForm
from posttrain.models.attention_settings import AttentionSettings
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import write_tiny_model

sys.path.append(str(Path(__file__).parent))
from test_token_pass import FAST, build

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}
DTYPES = pytest.mark.parametrize("dtype", list(CLOSE))
# Triton's run on a CUDA device, or slowly in its interpreter: TRITON_INTERPRET=1.
KINDS = pytest.mark.parametrize("kind", ["c++", "triton"])


def tiny_pass(folder: Path) -> TokenPass:
    return TokenPass(load_causal_lm(str(write_tiny_model(folder / "tiny")), dtype=torch.float32))


def compiled(dtype: torch.dtype) -> Kernels:
    found = load_kernels(dtype)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def device_of(kind: str) -> torch.device:
    return torch.device("cuda" if kind == "triton" and torch.cuda.is_available() else "cpu")


def kernels_of(kind: str, dtype: torch.dtype) -> PassKernels:
    if kind == "c++":
        return compiled(dtype)
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
        if dtype is torch.bfloat16:
            pytest.skip("the interpreter multiplies the bits of bfloat16 as if they were whole numbers")
    from posttrain.backends.rollout.native.triton_kernels import load_triton_kernels

    found = load_triton_kernels(dtype)
    assert not isinstance(found, str)
    return found


@KINDS
@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("width", [16, 41, 48])
@pytest.mark.parametrize("form", NormForm)
def test_norm(kind: str, dtype: torch.dtype, rows: int, width: int, form: NormForm) -> None:
    with device_of(kind):
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    got = kernels_of(kind, dtype).norm(x, weight, 1e-3, form)
    scaled = x.float() / (x.float().square().mean(dim=1, keepdim=True) + 1e-3).sqrt()
    expected = {
        NormForm.ROUNDED: scaled.to(dtype) * weight,
        NormForm.ONE_MORE: scaled * (1 + weight.float()),
        NormForm.UNROUNDED: scaled * weight.float(),
    }[form]
    torch.testing.assert_close(got, expected.to(dtype), **CLOSE[dtype])


def test_norm_by_hand() -> None:
    """Half 3 and half 4: the mean square is 12.5, eps 12.5 makes it 25; 3 / 5 * 2 and 4 / 5 * 2. Heads of a view, too."""
    x = torch.tensor([3.0, 4.0]).repeat_interleave(8).expand(2, 3, 16)[:, :2]
    got = compiled(torch.float32).norm(x, torch.full((16,), 2.0), 12.5, NormForm.ROUNDED)
    torch.testing.assert_close(got, torch.tensor([1.2, 1.6]).repeat_interleave(8).expand(2, 2, 16))


@KINDS
@DTYPES
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("width", [16, 35])
@pytest.mark.parametrize("activation", [silu, partial(gelu, approximate="tanh")], ids=["silu", "gelu"])
def test_gated(kind: str, dtype: torch.dtype, rows: int, width: int, activation: Any) -> None:
    with device_of(kind):
        gate, up = 20 * torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
        gate[0, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 1e30, -1e30])
    form = GateForm(GateKind.SILU if activation is silu else GateKind.GELU)
    got = kernels_of(kind, dtype).gated(torch.cat([gate, up], dim=1), form)
    torch.testing.assert_close(got, activation(gate) * up, **CLOSE[dtype])


@KINDS
@DTYPES
@pytest.mark.parametrize("width", [16, 35])
def test_clamped_gate(kind: str, dtype: torch.dtype, width: int) -> None:
    """Gates of at most 7, other factors from -7 to 7, and one more: transformers' code for gpt-oss's experts."""
    with device_of(kind):
        gate, up = (10 * torch.randn(5, width).to(dtype) for _ in range(2))
        gate[0, :4], up[0, :4] = torch.tensor([8.0, 7.0, -90.0, 1e30]), torch.tensor([-8.0, 8.0, -1.0, 1e30])
    got = kernels_of(kind, dtype).gated(torch.cat([gate, up], dim=1), GateForm(GateKind.CLAMPED, 1.702, 7.0))
    bounded = gate.double().clamp(max=7)
    expected = bounded * torch.sigmoid(1.702 * bounded) * (up.double().clamp(-7, 7) + 1)
    torch.testing.assert_close(got, expected.to(dtype), **CLOSE[dtype])
    assert got[0, 2] == 0 and abs(float(got[0, 3]) - 55.9998) < 0.001  # 7 sigmoid(11.914) (7 + 1); 56 in bfloat16


@DTYPES
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("width", [16, 41])
@pytest.mark.parametrize("kind", ActivationKind)
def test_activation_without_a_gate(dtype: torch.dtype, rows: int, width: int, kind: ActivationKind) -> None:
    x = (4 * torch.randn(rows, width)).to(dtype)
    x[0, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 1e15, torch.nan])
    got, expected = compiled(dtype).activate(x, kind), FORMULAS[kind](x.double())
    torch.testing.assert_close(got, expected.to(dtype), equal_nan=True, **CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("width", [16, 41, 48])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
def test_layer_norm(dtype: torch.dtype, rows: int, width: int, affine: tuple[bool, bool]) -> None:
    """With a mean that is large beside the spread."""
    x = (torch.randn(rows, width) + 30).to(dtype)
    weight, bias = (torch.randn(width).to(dtype) if wanted else None for wanted in affine)
    got = compiled(dtype).layer_norm(x, weight, bias, 1e-3)
    exact = (None if each is None else each.double() for each in (weight, bias))
    expected = layer_norm(x.double(), (width,), *exact, 1e-3)
    torch.testing.assert_close(got, expected.to(dtype), **CLOSE[dtype] | {"atol": 10 * CLOSE[dtype]["atol"]})


@KINDS
@DTYPES
def test_what_is_not_a_number_stays_in_its_place(kind: str, dtype: torch.dtype) -> None:
    with device_of(kind):
        x, weight = torch.ones(2, 64).to(dtype), torch.ones(64, dtype=dtype)
    x[0, 3] = torch.nan
    kernels = kernels_of(kind, dtype)
    assert kernels.gated(x, GateForm()).isnan().nonzero().tolist() == [[0, 3]]
    normed = kernels.norm(x, weight, 1e-5, NormForm.ROUNDED)
    assert normed[0].isnan().all() and not normed[1].isnan().any()


def ragged_cache(
    rows: list[tuple[int, int]],
    prompt_lens: list[int],
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    tile_step: int | None,
    rounding: RoundingKernel | None = None,
) -> KeyValueCache:
    """Rows of (prompt, tokens of the response so far), full of random numbers where tokens are and of NaN elsewhere."""
    sizes: dict[str, Any] = {"layers": [0], "kv_heads": kv_heads, "head_dim": dim, "dtype": dtype}
    cache = KeyValueCache(**sizes, device=torch.get_default_device(), tile_step=tile_step, rounding=rounding)

    def fill(slots: Slots, lengths: list[int]) -> None:
        keys, values = torch.full((2, len(slots.keys[0]), kv_heads, dim, slots.length), torch.nan).to(dtype)
        for slot, length in enumerate(lengths):
            for stored in (keys, values):
                stored[slot, :, :, :length] = torch.randn(kv_heads, dim, length).to(dtype)
        if isinstance(slots, TiledSlots):
            keys, values = tiled(keys, slots.step), tiled(values, 1, slots.step)
        else:
            values = values.transpose(2, 3)
        slots.keys[0].copy_(keys)
        slots.values[0].copy_(values)

    cache.prefilling([(0, length, slot, 0) for slot, length in enumerate(prompt_lens)])
    fill(cache.prompts, prompt_lens)
    cache.decoding([p for p, _ in rows], [prompt_lens[p] for p, _ in rows], [cached for _, cached in rows])
    fill(cache.responses, [cached for _, cached in rows])
    return cache


def rounding_of(kernels: PassKernels) -> RoundingKernel | None:
    return kernels.rounding if isinstance(kernels, Kernels) and kernels.rounding.used else None


def tiled(numbers: Tensor, step: int, tokens: int | None = None) -> Tensor:
    """As TiledSlots has [slots, kv_heads, dim, length]: line by line, ``step`` numbers of ``tokens`` (None: LENGTH_STEP) side by
    side, and 0 where a head is no whole number of steps."""
    slots, kv_heads, dim, length = numbers.shape
    tokens = tokens or LENGTH_STEP
    width = -(-dim // step) * step
    found = numbers.new_zeros(slots, kv_heads, length // tokens, width * tokens)
    token, i = torch.arange(length)[:, None], torch.arange(dim)
    place = i // step * step * tokens + token % tokens * step + i % step
    found[:, :, token // tokens, place] = numbers.transpose(2, 3)
    return found


def without_nan(cache: KeyValueCache) -> KeyValueCache:
    """A cache with the same content and 0 where no token is, which torch's operations need."""
    rows = (cache.prompt_slots.tolist(), cache.prompt_lens.tolist(), cache.places.tolist())
    other = KeyValueCache(
        layers=[0],
        kv_heads=cache.kv_heads,
        head_dim=cache.prompts.keys[0].shape[2],
        dtype=cache.prompts.keys[0].dtype,
        device=cache.prompts.keys[0].device,
    )
    other.prefilling([(0, cache.prompts.length, len(cache.prompts.keys[0]) - 1, 0)])
    other.decoding(*rows)
    for ours, theirs in ((other.prompts, cache.prompts), (other.responses, cache.responses)):
        for slot in range(len(theirs.keys[0])):
            keys, values = theirs.read(0, slot, min(ours.length, theirs.length))
            ours.keys[0][slot, ..., : keys.shape[2]] = keys.nan_to_num(0.0)
            ours.values[0][slot, :, : values.shape[1]] = values.nan_to_num(0.0)
    return other


def by_torch(cache: KeyValueCache, query_key: Tensor, value: Tensor, turn: Turn, settings: AttentionSettings) -> Tensor:
    """As Decoder has it."""
    heads = query_key.shape[1] - cache.kv_heads
    turned = turn_of(query_key, turn)
    cache.write(0, turned[:, heads:], value)
    return cache.attend(0, turned[:, :heads], settings).flatten(1)


def random_turn(rows: int, dim: int, rotated: int) -> Turn:
    cos, sin = torch.randn(2, rows, 1, dim)
    cos[..., rotated:], sin[..., rotated:] = 1.0, 0.0
    return Turn(cos, sin, rotated)


def turn_of(x: Tensor, turn: Turn) -> Tensor:
    cos, sin, rotated = turn
    rolled = torch.cat([x[..., :rotated].roll(rotated // 2, dims=-1), x[..., rotated:]], dim=-1)
    return (x.float() * cos + rolled.float() * sin).to(x.dtype)


@KINDS
@DTYPES
@given(
    prompt_lens=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100)), min_size=1, max_size=5),
    shared=st.sampled_from([1, 2, 3, 4, 7, 16]),
    dim=st.sampled_from([16, 22, 23, 28, 64, 80, 120, 128, 256]),
    rotated=st.sampled_from([1.0, 0.5, 0.0]),
    window=st.sampled_from([None, 1, 20, 100]),
    softcap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
    rounds=st.booleans(),
)
@settings(max_examples=40)
def test_attention(
    kind: str,
    dtype: torch.dtype,
    prompt_lens: list[int],
    rows: list[tuple[int, int]],
    shared: int,
    dim: int,
    rotated: float,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    rounds: bool,
) -> None:
    """Of ragged groups, whose prompts may be rounded: what comes out, and what is stored. Numbers behind the end of a row are
    never looked at."""
    kernels = kernels_of(kind, dtype)
    torch.manual_seed(len(rows))
    kv_heads, heads = 2, 2 * shared
    rows = [(prompt % len(prompt_lens), cached) for prompt, cached in rows]
    with device_of(kind):
        rounding = rounding_of(kernels) if rounds else None
        cache = ragged_cache(rows, prompt_lens, kv_heads, dim, dtype, kernels.tile_step, rounding)
        expected_cache = without_nan(cache)
        projected = torch.randn(len(rows), heads + 2 * kv_heads, dim).to(dtype)
        turn = random_turn(len(rows), dim, int(dim * rotated) // 2 * 2)
        of_heads = 3 * torch.randn(heads) if sinks else None
    query_key, value = projected.split([heads + kv_heads, kv_heads], dim=1)
    how = AttentionSettings(0.3, window, softcap, of_heads)
    got = kernels.attend(cache, 0, query_key, value, turn, how)
    expected = by_torch(expected_cache, query_key, value, turn, how)
    assert (got - expected).norm() <= CLOSE[dtype]["rtol"] * expected.norm()
    after = without_nan(cache)
    torch.testing.assert_close(after.responses.keys, expected_cache.responses.keys, **CLOSE[dtype])
    assert torch.equal(after.responses.values[0], expected_cache.responses.values[0])


@pytest.mark.slow
def test_attention_of_a_processor_without_products_of_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for processors of 2013, whose kernels multiply in float32 and store tokens one by one."""
    compiled(torch.bfloat16)
    flags = ("-march=x86-64-v3" if flag == "-march=native" else flag for flag in build_module.FLAGS)
    monkeypatch.setattr(build_module, "FLAGS", tuple(flag for flag in flags if flag != "-O3"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build_module.compiled_library.__wrapped__(kernels_module.SOURCE)
    assert not isinstance(library, str), library
    kernels = Kernels(library, torch.bfloat16)
    assert kernels.tile_step == 1
    rows = [(0, 40), (1, 0), (0, 17)]
    cache = ragged_cache(rows, [30, 5], 2, 28, torch.bfloat16, kernels.tile_step)
    expected_cache = without_nan(cache)
    projected, turn = torch.randn(3, 6 + 4, 28).bfloat16(), random_turn(3, 28, 28)
    query_key, value = projected.split([8, 2], dim=1)
    got = kernels.attend(cache, 0, query_key, value, turn, AttentionSettings(0.3, 20))
    expected = by_torch(expected_cache, query_key, value, turn, AttentionSettings(0.3, 20))
    assert (got - expected).norm() <= 0.02 * expected.norm()


@DTYPES
@pytest.mark.parametrize("rounds", [False, True])
def test_row_does_not_depend_on_the_others(dtype: torch.dtype, rounds: bool) -> None:
    """To the bit: the last of three rows, and the same row alone."""
    kernels = compiled(dtype)
    rows, prompt_lens = [(0, 70), (1, 3), (1, 20)], [30, 17]
    rounding = rounding_of(kernels) if rounds else None
    cache = ragged_cache(rows, prompt_lens, 2, 16, dtype, kernels.tile_step, rounding)
    query_key, value = torch.randn(3, 8, 16).to(dtype), torch.randn(3, 2, 16).to(dtype)
    turn = random_turn(3, 16, 16)
    together = kernels.attend(cache, 0, query_key, value, turn, AttentionSettings(0.3))
    cache.responses.move(2, 0, 20)
    cache.decoding([1], [17], [20])
    alone = kernels.attend(
        cache, 0, query_key[2:], value[2:], Turn(turn.cos[2:], turn.sin[2:], 16), AttentionSettings(0.3)
    )
    assert torch.equal(alone[0], together[2])


def with_sinks(asked: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key before all others whose score is the head's sink, and whose value is 0. Args: [heads, tokens, dim] each."""
    of_sink = torch.zeros(len(keys), 1, keys.shape[2] + 1, dtype=torch.float32)
    of_sink[..., -1] = 1
    longer = torch.cat([asked.float(), sinks[:, None, None].expand(-1, asked.shape[1], 1)], dim=2)
    keys, values = (torch.nn.functional.pad(each.float(), (0, 1)) for each in (keys, values))
    return longer, torch.cat([of_sink, keys], dim=1), torch.cat([torch.zeros_like(of_sink), values], dim=1)


@DTYPES
@given(
    parts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), min_size=1, max_size=3),
    shared=st.sampled_from([1, 3, 7]),
    dim=st.sampled_from([16, 22, 64, 80, 120]),
    rotated=st.sampled_from([1.0, 0.5, 0.0]),
    window=st.sampled_from([None, 1, 20]),
    long=st.booleans(),
    sinks=st.booleans(),
)
@settings(max_examples=25)
def test_attention_of_prompts(
    dtype: torch.dtype,
    parts: list[tuple[int, int]],
    shared: int,
    dim: int,
    rotated: float,
    window: int | None,
    long: bool,
    sinks: bool,
) -> None:
    """Of parts with (known tokens, new ones): no farther from the attention of all tokens in float64 than torch's own is, but
    for a share of its rounding; what is stored can be read; numbers behind the end of a slot are never looked at."""
    kernels = compiled(dtype)
    torch.manual_seed(len(parts))
    kv_heads, heads, rows = 2, 2 * shared, sum(new for _, new in parts)
    if long:  # past a chunk of keys
        parts[0] = (500, parts[0][1])
    cache = KeyValueCache(layers=[0], kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=torch.device("cpu"))
    ends = torch.tensor([new for _, new in parts]).cumsum(0).tolist()
    cache.prefilling(
        [(end - new, end, slot, known) for slot, (end, (known, new)) in enumerate(zip(ends, parts, strict=True))]
    )
    stored = cache.prompts.keys[0].transpose(2, 3), cache.prompts.values[0]  # [slots, kv_heads, tokens, dim]
    for part, (known, _) in enumerate(parts):
        for each in stored:
            each[part].fill_(torch.nan)
            each[part, :, :known] = torch.randn(kv_heads, known, dim).to(dtype)
    projected = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    query_key, value = projected.clone().split([heads + kv_heads, kv_heads], dim=1)
    turn = random_turn(rows, dim, int(dim * rotated) // 2 * 2)
    numbers = torch.tensor(cache.parts).T.contiguous()
    of_heads = 3 * torch.randn(heads) if sinks else None
    how = AttentionSettings(0.1, window, None, of_heads)
    got = kernels.prefill(cache, 0, numbers, query_key, value, turn, how)
    turned = turn_of(projected[:, : heads + kv_heads], turn)
    query, key = turned.split([heads, kv_heads], dim=1)
    for start, end, slot, known in cache.parts:
        count = known + end - start
        keys, values = (each[slot, :, :count] for each in stored)
        torch.testing.assert_close(keys[:, known:].transpose(0, 1), key[start:end], **CLOSE[dtype])
        assert torch.equal(values[:, known:].transpose(0, 1), projected[start:end, heads + kv_heads :])
        places = torch.arange(known, count)[:, None] - torch.arange(count)
        seen = (places >= 0) & (places < (window or count))
        asked = query[start:end].transpose(0, 1)
        if of_heads is not None:  # as a key whose value is 0: a query's last number is the sink, its key's is 1 / scale
            asked, keys, values = with_sinks(asked, keys, values, of_heads / 0.1)
            seen = torch.cat([torch.ones(len(seen), 1, dtype=torch.bool), seen], dim=1)
        own = [
            scaled_dot_product_attention(
                *(each.to(kind) for each in (asked, keys, values)), attn_mask=seen, scale=0.1, enable_gqa=True
            )[..., :dim]
            .transpose(0, 1)
            .flatten(1)
            for kind in (dtype, torch.float64)
        ]
        distance, of_torch = ((each.double() - own[1]).norm() / own[1].norm() for each in (got[start:end], own[0]))
        assert distance <= max(1.1 * of_torch, CLOSE[dtype]["rtol"] / 4)


@DTYPES
def test_prompt_does_not_depend_on_where_it_is_cut(dtype: torch.dtype) -> None:
    """To the bit: 600 tokens at once, and in two pieces."""
    kernels = compiled(dtype)
    query_key, value = torch.randn(600, 8, 16).to(dtype), torch.randn(600, 2, 16).to(dtype)
    cos, sin, _ = random_turn(600, 16, 16)

    def run(*pieces: tuple[int, int]) -> Tensor:
        cache = KeyValueCache(layers=[0], kv_heads=2, head_dim=16, dtype=dtype, device=torch.device("cpu"))
        cache.prefilling([(0, 600, 0, 0)])
        outputs = []
        for begin, end in pieces:
            part = torch.tensor([[0], [end - begin], [0], [begin]])
            turn = Turn(cos[begin:end], sin[begin:end], 16)
            given = query_key[begin:end].clone(), value[begin:end]
            outputs.append(kernels.prefill(cache, 0, part, *given, turn, AttentionSettings(0.3)))
        return torch.cat(outputs)

    assert torch.equal(run((0, 600)), run((0, 211), (211, 600)))


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no C++ compiler was found (install g++)"
    monkeypatch.setattr(kernels_module, "compiled_library", lambda source: reason)
    assert load_kernels(torch.float32) == reason
    token_pass = tiny_pass(tmp_path)
    assert token_pass.decoder is not None and token_pass.decoder.kernels is None
    assert "without compiled kernels, which is slower: no C++ compiler" in token_pass.note


def test_kernels_that_are_wrong_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(torch.float32)

    def wrong(self: Kernels, gate_up: Tensor, form: GateForm) -> Tensor:
        return torch.zeros_like(gate_up.chunk(2, dim=1)[0])

    monkeypatch.setattr(Kernels, "gated", wrong)
    token_pass = tiny_pass(tmp_path)
    assert token_pass.decoder is not None and token_pass.decoder.kernels is None
    assert "without compiled kernels, which is slower: their results differ here" in token_pass.note


def test_kernels_that_cannot_be_run_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles at the first call, and then says that there is no compiler or too little memory on the device."""
    compiled(torch.float32)

    def failing(self: Kernels, gate_up: Tensor, form: GateForm) -> Tensor:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(Kernels, "gated", failing)
    token_pass = tiny_pass(tmp_path)
    assert token_pass.decoder is not None and token_pass.decoder.kernels is None
    assert "slower: they cannot be run (Failed to find C compiler. Please specify via CC" in token_pass.note


ODD_SHAPE = {
    "head_dim": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 60,
    "intermediate_size": 70,
}


@pytest.mark.parametrize("shape", [{}, ODD_SHAPE], ids=["even", "odd"])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "phi",
        "olmo2",
        "granite",
        "smollm3",
        "starcoder2",
        "gpt_oss",
    ],
)
def test_triton_kernels_compute_what_each_family_computes(family: str, shape: dict[str, int]) -> None:
    found = fast_pass(build(family, **(FAST[family] | shape)), kernels_of("triton", torch.float32))
    assert not isinstance(found, str) and found[0].kernels is not None, found


@pytest.mark.slow
def test_kernels_for_cuda_in_tritons_interpreter() -> None:
    """Triton is not installed for this: its package takes more room than all others together."""
    where = os.environ.get("POSTTRAIN_TRITON")
    if not where:
        pytest.skip("POSTTRAIN_TRITON does not name a folder with Triton (make triton-env)")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        __file__,
        "-k",
        "triton and not interpreter",
    ]
    environment = os.environ | {"PYTHONPATH": where, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) > 20, done.stdout[-3000:]
