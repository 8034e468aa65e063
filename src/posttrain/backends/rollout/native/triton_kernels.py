"""Kernels of the decoding pass for CUDA devices, in Triton: what kernels.cpp computes for a processor, with the same rounding.

Attention reads of every row as many keys and values as it has, so no shape depends on lengths: a pass over the same number of
rows can be recorded once and replayed (graphs.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.kernels import GateForm, GateKind, Turn
from posttrain.libraries.cpu_kernels.update import NormForm
from posttrain.models.attention_settings import AttentionSettings

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS = 64  # keys that a program reads at a time
FEWEST = 16  # rows and columns of a product, as tl.dot wants them
# Programs that keep a device busy: with fewer rows, several share the keys of one.
PROGRAMS = 128
MOST_SPLITS = 16

ONE_MORE = tl.constexpr(int(NormForm.ONE_MORE))
ROUNDED = tl.constexpr(int(NormForm.ROUNDED))
GELU = tl.constexpr(int(GateKind.GELU))
CLAMPED = tl.constexpr(int(GateKind.CLAMPED))


@triton.jit
def _norm(x, weight, eps, output, FORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    numbers = tl.load(x + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    scaled = numbers / tl.sqrt(tl.sum(numbers * numbers, axis=0) / WIDTH + eps)
    if FORM == ROUNDED:
        scaled = scaled.to(output.dtype.element_ty).to(tl.float32)
    if FORM == ONE_MORE:
        gain += 1.0
    tl.store(output + row * WIDTH + i, scaled * gain, mask=inside)


@triton.jit
def _gated(x, output, width, slope, limit, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(x + 2 * row * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * width + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + 1.0
    power = gate * slope
    if KIND == GELU:  # x / (1 + e^(-2z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        power = gate * 1.5957691216 * (1.0 + 0.044715 * gate * gate)
    activated = (gate * tl.sigmoid(power)).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * width + i, activated * up, mask=inside)


@triton.jit
def _capped(scores, softcap):
    """Compute softcap tanh(scores / softcap); the scores where softcap is 0."""
    if softcap > 0:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _see(
    query, top, total, mixed, keys, values, room, begin, end, oldest, scaling, softcap,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Go on with a softmax over the tokens from ``begin`` to ``end`` that are ``oldest`` or younger: the largest score so far,
    the sum of the weights relative to it, and the values mixed by them."""
    d = tl.arange(0, DIM_BLOCK)
    in_dim = d < DIM
    for start in range(begin, end, TOKENS):
        t = start + tl.arange(0, TOKENS)
        there = t < end
        key = tl.load(keys + d[:, None] * room + t[None, :], mask=in_dim[:, None] & there[None, :], other=0.0)
        scores = _capped(tl.dot(query, key, input_precision="ieee") * scaling, softcap)
        scores = tl.where((there & (t >= oldest))[None, :], scores, -float("inf"))
        now = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(now == -float("inf"), 0.0, now)  # nothing has been seen yet
        weights = tl.exp(scores - base[:, None])
        shrunk = tl.exp(top - base)
        value = tl.load(values + t[:, None] * DIM + d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
        total = total * shrunk + tl.sum(weights, axis=1)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = now
    return top, total, mixed


@triton.jit
def _attend(
    query_key, value, cos, sin, prompt_keys, prompt_values, response_keys, response_values,
    prompt_slots, prompt_lens, places, output, mixtures, tops, totals, sinks,
    query_key_stride, value_stride, prompt_room, response_room, scaling, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARED_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    ROTATED: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One row and one key head: turn its queries and its new key, store key and value, attend. Several programs share a row's
    tokens where SPLITS > 1, and _combine adds them up."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    SHARED: tl.constexpr = HEADS // KV_HEADS
    d, h = tl.arange(0, DIM_BLOCK), tl.arange(0, SHARED_BLOCK)
    in_dim, turned, real = d < DIM, d < ROTATED, h < SHARED
    rolled = tl.where(d < ROTATED // 2, d + ROTATED // 2, d - ROTATED // 2)
    cosine = tl.load(cos + row * DIM + d, mask=in_dim, other=0.0)
    sine = tl.load(sin + row * DIM + d, mask=in_dim, other=0.0)

    head = kv_head * SHARED + h
    at = query_key + row * query_key_stride + head[:, None] * DIM
    plain = tl.load(at + d[None, :], mask=real[:, None] & in_dim[None, :], other=0.0).to(tl.float32)
    beside = tl.load(at + rolled[None, :], mask=real[:, None] & turned[None, :], other=0.0).to(tl.float32)
    query = (plain * cosine[None, :] + beside * sine[None, :]).to(output.dtype.element_ty)
    key_at = query_key + row * query_key_stride + (HEADS + kv_head) * DIM
    plain_key = tl.load(key_at + d, mask=in_dim, other=0.0).to(tl.float32)
    beside_key = tl.load(key_at + rolled, mask=turned, other=0.0).to(tl.float32)
    key = (plain_key * cosine + beside_key * sine).to(output.dtype.element_ty)
    new_value = tl.load(value + row * value_stride + kv_head * DIM + d, mask=in_dim, other=0.0)

    place, prompt_len = tl.load(places + row), tl.load(prompt_lens + row)
    own = (row * KV_HEADS + kv_head) * DIM * response_room
    first = split == 0
    if first:
        tl.store(response_keys + own + d * response_room + place, key, mask=in_dim)
        tl.store(response_values + own + place * DIM + d, new_value, mask=in_dim)

    # The new token, which the first program counts without reading it back, begins the softmax.
    score = _capped(tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scaling, softcap)
    top = tl.where(first, score, -float("inf"))
    total = tl.where(first, 1.0, 0.0) + tl.zeros([SHARED_BLOCK], tl.float32)
    mixed = tl.where(first, new_value.to(tl.float32), 0.0)[None, :] + tl.zeros([SHARED_BLOCK, DIM_BLOCK], tl.float32)
    if SINKS:  # a score that takes its share of the weights and adds no value
        sink = tl.where(first, tl.load(sinks + head, mask=real, other=0.0), -float("inf"))
        now = tl.maximum(top, sink)
        base = tl.where(first, now, 0.0)
        kept = tl.exp(top - base)
        total, mixed = total * kept + tl.exp(sink - base), mixed * kept[:, None]
        top = now

    oldest = tl.where(window > 0, tl.maximum(prompt_len + place + 1 - window, 0), 0)
    prompt = (tl.load(prompt_slots + row) * KV_HEADS + kv_head) * DIM * prompt_room
    share = tl.cdiv(tl.cdiv(prompt_len, TOKENS), SPLITS) * TOKENS
    begin = tl.maximum(split * share, oldest // TOKENS * TOKENS)
    end = tl.minimum((split + 1) * share, prompt_len)
    top, total, mixed = _see(
        query, top, total, mixed, prompt_keys + prompt, prompt_values + prompt, prompt_room, begin, end, oldest, scaling,
        softcap, DIM, DIM_BLOCK, TOKENS,
    )  # fmt: skip
    oldest = tl.maximum(oldest - prompt_len, 0)
    share = tl.cdiv(tl.cdiv(place, TOKENS), SPLITS) * TOKENS
    begin = tl.maximum(split * share, oldest // TOKENS * TOKENS)
    end = tl.minimum((split + 1) * share, place)
    top, total, mixed = _see(
        query, top, total, mixed, response_keys + own, response_values + own, response_room, begin, end, oldest, scaling,
        softcap, DIM, DIM_BLOCK, TOKENS,
    )  # fmt: skip

    if SPLITS == 1:
        to = output + row * HEADS * DIM + head[:, None] * DIM + d[None, :]
        tl.store(to, mixed / total[:, None], mask=real[:, None] & in_dim[None, :])
    else:
        part = (row * HEADS + head) * SPLITS + split
        tl.store(tops + part, top, mask=real)
        tl.store(totals + part, total, mask=real)
        tl.store(mixtures + part[:, None] * DIM + d[None, :], mixed, mask=real[:, None] & in_dim[None, :])


@triton.jit
def _combine(mixtures, tops, totals, output, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    row_head = tl.program_id(0).to(tl.int64)
    part, d = row_head * SPLITS + tl.arange(0, SPLITS), tl.arange(0, DIM_BLOCK)
    top = tl.load(tops + part)
    weights = tl.exp(top - tl.max(top, axis=0))
    mixed = tl.load(mixtures + part[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    total = tl.sum(weights * tl.load(totals + part), axis=0)
    tl.store(output + row_head * DIM + d, tl.sum(weights[:, None] * mixed, axis=0) / total, mask=d < DIM)


class TritonKernels:
    """Kernels for CUDA tensors of one dtype. See kernels.PassKernels. Prompts go through torch's own attention."""

    narrowest = 1
    tile_step = None

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        x = x.contiguous()
        width, output = len(weight), torch.empty_like(x)
        _norm[(x.numel() // width,)](
            x, weight, eps, output, FORM=int(form), WIDTH=width, BLOCK=triton.next_power_of_2(width)
        )
        return output

    def gated(self, gate_up: Tensor, form: GateForm) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(rows, width)
        grid = rows, triton.cdiv(width, 1024)
        _gated[grid](gate_up, output, width, form.slope, form.limit, KIND=int(form.kind), BLOCK=1024)
        return output

    def attend(
        self,
        cache: KeyValueCache,
        layer: int,
        query_key: Tensor,
        value: Tensor,
        turn: Turn,
        settings: AttentionSettings,
    ) -> Tensor:
        rows, turned, dim = query_key.shape
        kv_heads, heads = cache.kv_heads, turned - cache.kv_heads
        prompts, responses = cache.prompts, cache.responses
        splits = _splits(rows * kv_heads)
        output = query_key.new_empty(rows, heads * dim)
        sums = query_key.new_empty(rows * heads * splits, dim + 2, dtype=torch.float32) if splits > 1 else None
        mixtures, tops, totals = (None, None, None) if sums is None else _three(sums, dim)
        block = triton.next_power_of_2(max(dim, FEWEST))
        _attend[(rows, kv_heads, splits)](
            query_key, value, turn.cos, turn.sin, prompts.keys[layer], prompts.values[layer],
            responses.keys[layer], responses.values[layer], cache.prompt_slots, cache.prompt_lens, cache.places,
            output, mixtures, tops, totals, settings.sinks,
            query_key.stride(0), value.stride(0), prompts.length, responses.length,
            settings.scaling, settings.softcap or 0.0, settings.window or 0,
            HEADS=heads, KV_HEADS=kv_heads, SHARED_BLOCK=triton.next_power_of_2(max(heads // kv_heads, FEWEST)),
            DIM=dim, DIM_BLOCK=block, ROTATED=turn.rotated, SPLITS=splits, TOKENS=TOKENS,
            SINKS=settings.sinks is not None,
        )  # fmt: skip
        if splits > 1:
            _combine[(rows * heads,)](mixtures, tops, totals, output, DIM=dim, DIM_BLOCK=block, SPLITS=splits)
        return output


def _splits(programs: int) -> int:
    """Return how many programs share the tokens of a row and key head, a power of two, where there are ``programs`` of these."""
    splits = 1
    while splits < MOST_SPLITS and programs * splits < PROGRAMS:
        splits *= 2
    return splits


def _three(sums: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut one allocation, [parts, dim + 2], into mixtures [parts, dim], largest scores [parts] and sums of weights [parts]."""
    flat, parts = sums.view(-1), len(sums)
    return flat[: parts * dim], flat[parts * dim : parts * (dim + 1)], flat[parts * (dim + 1) :]


def load_triton_kernels(dtype: torch.dtype) -> TritonKernels | str:
    """Return the kernels for CUDA tensors of ``dtype``, or why there are none."""
    return TritonKernels(dtype) if dtype in DTYPES else f"they do not compute in {dtype}"
