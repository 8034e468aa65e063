"""Our attention gives what the unmodified Hugging Face model gives, sequence by sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.backends.rollout.native.slots import SlotCache
from posttrain.models import attention as attention_module
from posttrain.models.attention import NAME, CachedRows, attention, packed_layout, register_attention
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


def build(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model twice: with our attention, and with transformers' own (eager, the plainest)."""
    register_attention()
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
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


@pytest.fixture(params=["plain", "fused"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of attending inside a bucket; on a CPU the fused one is for long sequences only."""
    if request.param == "fused":
        monkeypatch.setattr(attention_module, "LONGEST_PLAIN", 0)
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one_in_values_and_gradients(family: str, kernel: str) -> None:
    ours, plain = build(family)
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
    ours, plain = build(family)
    sequences = sequences_of(lengths)
    with torch.no_grad():
        for got, expected in zip(packed_logits(ours, sequences), plain_logits(plain, sequences), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", SLIDING)
def test_window_is_felt_in_these_tests(family: str) -> None:
    """Without the window the numbers would differ: the agreement above is not for want of length."""
    ours, plain = build(family)
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
    monkeypatch.setattr(attention_module, "MAX_SCORES", 250)
    layout = packed_layout([10] * 5)
    assert [bucket.rows for bucket in layout.buckets] == [2, 2, 1]  # 2 * 10^2 <= 250 < 3 * 10^2
    long = packed_layout([20, 20])  # one sequence is always taken, however long
    assert [bucket.rows for bucket in long.buckets] == [1, 1]


# ------------------------------------------------------------------------------------------------------- decoding


def new_cache(model: PreTrainedModel, slots: int, max_len: int) -> SlotCache:
    config = model.config
    return SlotCache(
        layers=config.num_hidden_layers,
        slots=slots,
        kv_heads=config.num_key_value_heads,
        max_len=max_len,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_with_the_cache_equals_the_full_forward(family: str) -> None:
    """Teacher forcing: prompts of 3, 10 and 1 tokens are prefilled together, then each goes on for 18 tokens, past the
    window of the sliding models."""
    ours, plain = build(family)
    prompt_lengths, steps = [3, 10, 1], 18
    sequences = sequences_of([length + steps for length in prompt_lengths])
    expected = plain_logits(plain, sequences)
    cache = new_cache(ours, slots=4, max_len=10 + steps)
    starts = [0, 3, 13, 14]
    cache.prefilling([(begin, end, [slot]) for slot, (begin, end) in enumerate(pairwise(starts))])
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
        visible_len = int(positions.max()) + 1
        cache.decoding(positions, visible_len)
        logits = ours(
            input_ids=torch.stack([tokens[p] for tokens, p in zip(sequences, positions.tolist(), strict=True)])[:, None],
            position_ids=positions[:, None],
            past_key_values=cache,
            attention_layout=CachedRows(torch.arange(visible_len) <= positions[:, None]),
            use_cache=False,
        ).logits[:, -1]
        for row, position in enumerate(positions.tolist()):
            torch.testing.assert_close(logits[row], expected[row][position], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("attend", [attention_module._attend_plain, attention_module._attend_fused])
def test_attention_of_three_tokens_by_hand(attend: Callable[..., Tensor]) -> None:
    """One head of width 1, scaling 1, queries 0: weights are equal over what is seen, so outputs are running means."""
    query, key = torch.zeros(1, 1, 3, 1), torch.randn(1, 1, 3, 1)
    value = torch.tensor([3.0, 6.0, 12.0]).view(1, 1, 3, 1)
    everything = attend(query, key, value, 1.0, None).flatten().tolist()
    assert everything == pytest.approx([3.0, (3 + 6) / 2, (3 + 6 + 12) / 3])
    window_of_two = attend(query, key, value, 1.0, 2).flatten().tolist()
    assert window_of_two == pytest.approx([3.0, (3 + 6) / 2, (6 + 12) / 2])
