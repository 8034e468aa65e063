"""Our attention gives what the unmodified Hugging Face model gives, sequence by sequence."""

from __future__ import annotations

import copy
import math
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.errors import ModelError
from posttrain.libraries.cpu_kernels import load
from posttrain.models import packed_attention
from posttrain.models.attention import NAME, CachedRows, attention, register_attention
from posttrain.models.packed_attention import Group, attend_packed, continued_layout, packed_layout, shared_layout
from posttrain.models.tiny import draw_weights

WINDOW = 8
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {},  # biases
    "qwen3": {"head_dim": 16},  # norms on queries and keys; heads wider than hidden_size / heads
    "mistral": {"sliding_window": WINDOW, "head_dim": 8},  # every layer sees the last 8 tokens
    "gemma3_text": {  # one sliding and one full layer, its own scaling, one key/value head
        "sliding_window": WINDOW,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {  # sinks; one sliding and one full layer
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {  # latents of keys and values, which are narrower than keys
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
SLIDING = ["mistral", "gemma3_text"]

LENGTHS = {
    "ragged": [21, 3, 1, 13, 22, 5],
    "one sequence": [17],
    "one token": [1],
    "several of one token": [1, 1, 1],
    "equal": [9, 9, 9, 9],
    "longer than the window by one": [WINDOW + 1, WINDOW],
}


@cache
def build(family: str, kernel: str = "plain") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model twice: with our attention, and with transformers' own (eager, the plainest). Compiled attention needs
    heads of a multiple of 16."""
    register_attention()
    wider = {"head_dim": 16} if kernel == "compiled" and family != "deepseek_v3" else {}
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **wider})
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    draw_weights(plain, seed=1)
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=NAME).eval()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def sequences_of(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def packed_logits(model: PreTrainedModel, sequences: list[Tensor]) -> list[Tensor]:
    """Logits of each sequence, from one packed pass."""
    lengths = [len(tokens) for tokens in sequences]
    output = model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        attention_layout=packed_layout(lengths),
        use_cache=False,
    )
    return list(output.logits[0].split(lengths))


def plain_logits(model: PreTrainedModel, sequences: list[Tensor]) -> list[Tensor]:
    return [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences]


def gradients(model: PreTrainedModel, logits: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    sum((part.log_softmax(-1)[:, 5] * torch.linspace(0.5, 2, len(part))).sum() for part in logits).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(params=["compiled", "plain", "fused"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways of attending: compiled, and without a compiler inside buckets, where the fused one is for long sequences only."""
    monkeypatch.setattr(load, "_allowed", request.param == "compiled")
    if request.param == "fused":
        monkeypatch.setattr(packed_attention, "LONGEST_PLAIN", 0)
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one_in_values_and_gradients(family: str, kernel: str) -> None:
    ours, plain = build(family, kernel)
    sequences = sequences_of(LENGTHS["ragged"])
    mine, theirs = packed_logits(ours, sequences), plain_logits(plain, sequences)
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
    got_gradients, expected_gradients = gradients(ours, mine), gradients(plain, theirs)
    for name, expected in expected_gradients.items():
        difference = (got_gradients[name] - expected).norm() / expected.norm()
        assert difference < 1e-5, name


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_equals_one_by_one_for_lengths_at_the_edges(family: str, lengths: list[int], kernel: str) -> None:
    ours, plain = build(family, kernel)
    sequences = sequences_of(lengths)
    with torch.no_grad():
        for got, expected in zip(packed_logits(ours, sequences), plain_logits(plain, sequences), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", SLIDING)
def test_window_is_felt_in_these_tests(family: str) -> None:
    """Without the window the numbers would differ: the agreement above is not for want of length."""
    ours, plain = build.__wrapped__(family)  # the window is changed
    tokens = sequences_of([21])
    ours.config.sliding_window = None  # where Mistral's layers look it up
    for layer in ours.model.layers:
        layer.self_attn.sliding_window = None  # and Gemma's
    with torch.no_grad():
        difference = (packed_logits(ours, tokens)[0] - plain_logits(plain, tokens)[0]).abs()
    assert difference[:WINDOW].max() < 1e-4  # the first 8 tokens see everything before them in either case
    assert difference[WINDOW:].max() > 1e-2


def test_sequence_does_not_see_its_neighbours() -> None:
    """The same sequence with other neighbours, and at another place: its logits are the same bits while its bucket is."""
    ours, _ = build("llama")
    first, second, third = sequences_of([7, 7, 7])
    with torch.no_grad():
        alone = packed_logits(ours, [first, second])[0]
        changed = packed_logits(ours, [first, third])[0]
        moved = packed_logits(ours, [third, first])[1]
    torch.testing.assert_close(changed, alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(moved, alone, rtol=0, atol=1e-6)


def test_padding_inside_a_bucket_gets_no_gradient_and_gives_none() -> None:
    """Lengths 10 and 9 share a bucket (2 * 100 <= 1.25 * 181), so the shorter one is padded by one place."""
    layout = packed_layout([9, 10])
    assert [(bucket.rows, bucket.length) for bucket in layout.buckets] == [(2, 10)]
    states = [torch.randn(1, heads, 19, 4, requires_grad=True) for heads in (4, 2, 2)]
    output, _ = attention(torch.nn.Module(), *states, None, scaling=0.5, attention_layout=layout)
    assert output.shape == (1, 19, 4, 4)
    output.sum().backward()
    assert all(torch.isfinite(state.grad).all() for state in states)


# ---------------------------------------------------------------------------------------------------- the layout


def test_layout_groups_like_lengths_and_covers_every_token_once() -> None:
    layout = packed_layout([3, 40, 4, 38, 1])
    # 40 and 38: 2 * 1600 <= 1.25 * (1600 + 1444). 4 and 3: 32 > 1.25 * (16 + 9) = 31.25, so they stay apart.
    assert [(bucket.rows, bucket.length) for bucket in layout.buckets] == [(2, 40), (1, 4), (1, 3), (1, 1)]
    tokens = torch.cat([bucket.tokens for bucket in layout.buckets])
    assert sorted(tokens.tolist()) == list(range(86))
    assert tokens[layout.order].tolist() == list(range(86))
    assert layout.buckets[0].tokens.tolist() == [*range(3, 43), *range(47, 85)]
    assert layout.buckets[0].places.tolist() == [*range(40), *range(40, 78)]


def test_layout_bounds_the_scores_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "MAX_SCORES", 250)
    layout = packed_layout([10] * 5)
    assert [bucket.rows for bucket in layout.buckets] == [2, 2, 1]  # 2 * 10^2 <= 250 < 3 * 10^2
    long = packed_layout([20, 20])  # one sequence is always taken, however long
    assert [bucket.rows for bucket in long.buckets] == [1, 1]


# ------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_with_the_cache_equals_the_full_forward(family: str) -> None:
    """Teacher forcing: prompts of 3, 10 and 1 tokens are prefilled together, then each goes on for 18 tokens, past the
    window of the sliding models."""
    ours, plain = build(family)
    prompt_lengths, steps = [3, 10, 1], 18
    sequences = sequences_of([length + steps for length in prompt_lengths])
    expected = plain_logits(plain, sequences)
    cache = KeyValueCache.of(ours)
    starts = [0, 3, 13, 14]
    cache.prefilling([(begin, end, slot, 0) for slot, (begin, end) in enumerate(pairwise(starts))])
    prefill = ours(
        input_ids=torch.cat([tokens[:n] for tokens, n in zip(sequences, prompt_lengths, strict=True)])[None],
        position_ids=torch.cat([torch.arange(n) for n in prompt_lengths])[None],
        past_key_values=cache,
        attention_layout=packed_layout(prompt_lengths),
        use_cache=False,
    ).logits[0]
    for row, end in enumerate(starts[1:]):
        torch.testing.assert_close(prefill[end - 1], expected[row][prompt_lengths[row] - 1], rtol=1e-4, atol=2e-5)
    for step in range(steps):
        positions = torch.tensor([length + step for length in prompt_lengths])
        cache.decoding(range(3), prompt_lengths, [step] * 3)
        logits = ours(
            input_ids=torch.stack([tokens[p] for tokens, p in zip(sequences, positions.tolist(), strict=True)])[
                :, None
            ],
            position_ids=positions[:, None],
            past_key_values=cache,
            attention_layout=CachedRows(cache),
            use_cache=False,
        ).logits[:, -1]
        for row, position in enumerate(positions.tolist()):
            torch.testing.assert_close(logits[row], expected[row][position], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_prefill_behind_known_tokens_equals_the_full_forward(family: str, kernel: str) -> None:
    """Of three sequences of 20, 9 and 12 tokens, 14, none and 3 are prefilled first, the rest in one row afterwards."""
    ours, plain = build(family)
    lengths, known = [20, 9, 12], [14, 0, 3]
    sequences = sequences_of(lengths)
    expected = plain_logits(plain, sequences)
    cache = KeyValueCache.of(ours)

    def prefill(begins: list[int], ends: list[int]) -> torch.Tensor:
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        stops = torch.tensor(counts).cumsum(0).tolist()
        places = zip(stops, counts, begins, strict=True)
        cache.prefilling([(stop - count, stop, slot, begin) for slot, (stop, count, begin) in enumerate(places)])
        pieces = [torch.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        return ours(
            input_ids=torch.cat([tokens[piece] for tokens, piece in zip(sequences, pieces, strict=True)])[None],
            position_ids=torch.cat(pieces)[None],
            past_key_values=cache,
            attention_layout=continued_layout(list(zip(begins, counts, strict=True))),
            use_cache=False,
        ).logits[0]

    prefill([0, 0, 0], [14, 0, 3])
    got = prefill(known, lengths).split([6, 9, 9])
    for row, logits in enumerate(got):
        torch.testing.assert_close(logits, expected[row][known[row] :], rtol=1e-4, atol=2e-5)


def test_attention_of_three_tokens_by_hand(kernel: str) -> None:
    """One head of width 1, queries 0: weights are equal over what is seen, so outputs are running means."""
    query, key = torch.zeros(1, 1, 3, 1), torch.randn(1, 1, 3, 1)
    value = torch.tensor([3.0, 6.0, 12.0]).view(1, 1, 3, 1)
    everything = attend_packed(query, key, value, packed_layout([3]), 1.0, None).flatten().tolist()
    assert everything == pytest.approx([3.0, (3 + 6) / 2, (3 + 6 + 12) / 3])
    window_of_two = attend_packed(query, key, value, packed_layout([3]), 1.0, 2).flatten().tolist()
    assert window_of_two == pytest.approx([3.0, (3 + 6) / 2, (6 + 12) / 2])


def test_attention_behind_a_shared_prompt_by_hand(kernel: str) -> None:
    """A prompt of values 3, 6 and two responses, 12 and (30, 9): each sees the prompt and itself, not the other."""
    query, key = torch.zeros(1, 1, 5, 1), torch.randn(1, 1, 5, 1)
    value = torch.tensor([3.0, 6.0, 12.0, 30.0, 9.0]).view(1, 1, 5, 1)
    layout = shared_layout([(2, (1, 2))])
    got = attend_packed(query, key, value, layout, 1.0, None).flatten().tolist()
    assert got == pytest.approx([3.0, 4.5, (3 + 6 + 12) / 3, (3 + 6 + 30) / 3, (3 + 6 + 30 + 9) / 4])
    got = attend_packed(query, key, value, layout, 1.0, 2).flatten().tolist()
    assert got == pytest.approx([3.0, 4.5, (6 + 12) / 2, (6 + 30) / 2, (30 + 9) / 2])


@pytest.mark.parametrize("keyword", ["position_bias"])
def test_model_that_asks_for_more_than_we_compute_is_refused(keyword: str) -> None:
    """Architectures that nobody has listed: better no run than a wrong one."""
    states = [torch.randn(1, 1, 3, 4) for _ in range(3)]
    call = {"scaling": 1.0, "attention_layout": packed_layout([3])}
    attention(torch.nn.Module(), *states, None, **call, **{keyword: None})
    with pytest.raises(ModelError, match=f"Module passes {keyword} to its attention, which is not supported"):
        attention(torch.nn.Module(), *states, None, **call, **{keyword: torch.ones(1)})
    with pytest.raises(ModelError, match="passes attention_mask"):
        attention(torch.nn.Module(), *states, torch.zeros(1, 1, 3, 3), **call)
    with pytest.raises(ModelError, match="Module is not given the keywords of its model's forward pass"):
        attention(torch.nn.Module(), *states, None, scaling=1.0)


def test_sinks_by_hand() -> None:
    """A query of 1 sees keys 0 and ln 3, so weights of 1 and 3 beside a sink of ln 4: values 10 and 1 give (10 + 3) / 8. The
    first token sees itself alone: 10 / 5. The sink's gradient is the sum of -U rowsum(dW W): -4/8 x 13/8 - 4/5 x 10/5."""
    query, key, value = (
        torch.tensor(numbers).view(1, 1, 2, 1) for numbers in ([1.0, 1.0], [0.0, math.log(3)], [10.0, 1.0])
    )
    sinks = torch.tensor([math.log(4)], requires_grad=True)
    got = attend_packed(query, key, value, packed_layout([2]), 1.0, None, None, sinks)
    assert got.flatten().tolist() == pytest.approx([2.0, 10 / 8 + 3 / 8])
    got.sum().backward()
    assert sinks.grad is not None and sinks.grad.tolist() == pytest.approx([-4 / 8 * 13 / 8 - 4 / 5 * 2])


def test_soft_cap_by_hand() -> None:
    """A query of 1 sees keys 0 and 2 with a cap of 2: scores 0 and 2 tanh(2 / 2) = 1.5232, so the second value, 1, weighs
    e^1.5232 / (1 + e^1.5232) = 4.5868 / 5.5868 = 0.8210."""
    query, key, value = (torch.tensor(numbers).view(1, 1, 2, 1) for numbers in ([1.0, 1.0], [0.0, 2.0], [0.0, 1.0]))
    got = attend_packed(query, key, value, packed_layout([2]), 1.0, None, 2.0).flatten().tolist()
    assert got == pytest.approx([0.0, 0.8210], abs=1e-4)


# ------------------------------------------------------------------------------------------------- shared prompts

SHARED: dict[str, list[Group]] = {
    "one group": [(6, (4, 9, 1))],
    "prompts of different lengths in one bucket": [(9, (8, 9)), (10, (9, 7)), (8, (9, 9))],
    "groups of different sizes": [(5, (3, 2)), (4, (6, 1, 3)), (12, (10, 2))],
    "beside whole sequences": [(14, ()), (3, (5, 5, 4)), (1, ()), (7, (1, 1))],
    "prompt of one token": [(1, (1, 1)), (1, (11, 3))],
}


def in_a_row(groups: list[Group]) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Returns: the tokens and positions of a packed row; every sequence by itself; and where its tokens stand in the row."""
    generator = torch.Generator().manual_seed(2)
    row: list[Tensor] = []
    positions: list[Tensor] = []
    whole: list[Tensor] = []
    where: list[Tensor] = []
    start = 0
    for prompt_length, responses in groups:
        prompt = torch.randint(0, 64, (prompt_length,), generator=generator)
        prompt_at = torch.arange(start, start + prompt_length)
        row.append(prompt)
        positions.append(torch.arange(prompt_length))
        start += prompt_length
        for length in responses:
            response = torch.randint(0, 64, (length,), generator=generator)
            row.append(response)
            positions.append(torch.arange(prompt_length, prompt_length + length))
            whole.append(torch.cat([prompt, response]))
            where.append(torch.cat([prompt_at, torch.arange(start, start + length)]))
            start += length
        if not responses:
            whole.append(prompt)
            where.append(prompt_at)
    return torch.cat(row), torch.cat(positions), whole, where


@cache
def one_by_one(family: str, shared: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits and gradients of every sequence by itself, by transformers' own attention."""
    plain = build(family)[1]
    theirs = plain_logits(plain, in_a_row(SHARED[shared])[2])
    return [logits.detach() for logits in theirs], gradients(plain, theirs)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_equal_one_by_one_in_values_and_gradients(family: str, shared: str, kernel: str) -> None:
    ours, _ = build(family)
    row, positions, _, where = in_a_row(SHARED[shared])
    logits = ours(
        input_ids=row[None],
        position_ids=positions[None],
        attention_layout=shared_layout(SHARED[shared]),
        use_cache=False,
    ).logits[0]
    mine = [logits[places] for places in where]
    theirs, expected_gradients = one_by_one(family, shared)
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
    got_gradients = gradients(ours, mine)
    for name, expected in expected_gradients.items():
        assert (got_gradients[name] - expected).norm() < 1e-5 * expected.norm(), name


def test_shared_layout_puts_groups_of_like_size_and_length_together() -> None:
    layout = shared_layout(SHARED["prompts of different lengths in one bucket"])
    prompts, responses = layout.buckets
    assert (prompts.rows, prompts.length, prompts.prefix) == (3, 10, None)  # the prompts' own tokens
    assert (responses.rows, responses.length) == (6, 9)
    assert responses.prefix is not None and responses.prefix.length == 10
    # Prompts are padded on the left, so that they end where their responses begin.
    assert responses.prefix.visible.sum(dim=1).tolist() == [10, 9, 8]
    assert all(responses.prefix.visible[:, -1])


@pytest.mark.parametrize("longest", [1024, 12, 0])
def test_gradients_of_a_row_are_the_numeric_ones(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences, shared prompts of several lengths and a window, in buckets by products, by the fused kernel, by both."""
    monkeypatch.setattr(packed_attention, "LONGEST_PLAIN", longest)
    layout = shared_layout([(3, (2, 4)), (5, (4, 1)), (14, ()), (2, ())])
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, 35, 2, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    ]
    plain = [bucket.keys <= longest for bucket in layout.buckets]
    assert {1024: all(plain), 12: any(plain) and not all(plain), 0: not any(plain)}[longest]
    for window, softcap in ((None, None), (3, None), (3, 1.5)):
        weights = torch.randn(1, 35, 4, 2, generator=generator, dtype=torch.float64)

        given = 0.7, window, softcap

        def loss(*states: Tensor, given: Any = given, weights: Tensor = weights) -> Tensor:
            return (attend_packed(*states, layout, *given) * weights).sum()

        assert torch.autograd.gradcheck(loss, states, fast_mode=True)


def test_a_sequence_that_is_not_finite_stays_alone() -> None:
    """Padding is filled with tokens of the same sequence, so nothing reaches a neighbour in the bucket."""
    layout = shared_layout([(3, (2, 4)), (2, (4, 1)), (4, ()), (5, ())])
    assert any(len(bucket.tokens) < bucket.rows * bucket.length for bucket in layout.buckets)  # there is padding
    states = [torch.randn(1, heads, 25, 2) for heads in (4, 2, 2)]
    spoilt = [each.clone() for each in states]
    for each in spoilt:
        each[:, :, 20:] = torch.nan  # the last sequence
    outputs = []
    for each in (states, spoilt):
        leaves = [one.requires_grad_() for one in each]
        output = attend_packed(*leaves, layout, 0.5, None)
        output[:, :20].square().sum().backward()
        outputs.append((output[:, :20], [one.grad[:, :, :20] for one in leaves]))
    (mine, my_grads), (theirs, their_grads) = outputs
    assert torch.equal(mine, theirs)
    assert all(torch.equal(one, other) for one, other in zip(my_grads, their_grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_longer_sequences_take_the_fused_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No farther from float64 than plain products; a window, a prompt that is shared and short sequences stay with these."""
    fused: list[int] = []
    attend = packed_attention._attend_fused

    def counted(query: Tensor, *rest: Any) -> Tensor:
        fused.append(query.shape[2])
        return attend(query, *rest)

    monkeypatch.setattr(packed_attention, "_attend_fused", counted)
    monkeypatch.setattr(load, "_allowed", False)  # compiled attention takes all of them
    generator = torch.Generator().manual_seed(0)
    layout = shared_layout([(300, ()), (257, ()), (40, ()), (280, (30, 20))])
    states = [torch.randn(1, heads, 927, 16, generator=generator).to(dtype) for heads in (4, 2, 2)]
    expected = attend_packed(*(each.double() for each in states), layout, 0.25, None)
    plain = attend_packed(*states, layout, 0.25, None)
    assert not fused
    with torch.no_grad():
        got = attend_packed(*states, layout, 0.25, None)
        assert fused and min(fused) > 256
        fused.clear()
        windowed = attend_packed(*states, layout, 0.25, 100)
    assert not fused and torch.equal(windowed, attend_packed(*states, layout, 0.25, 100))
    assert (got - expected).norm() <= 1.1 * (plain - expected).norm()
