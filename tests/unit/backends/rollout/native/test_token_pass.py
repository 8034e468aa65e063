"""The fast pass computes what the model computes, and knows when it does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.backends.rollout.native import decoder as decoder_module
from posttrain.backends.rollout.native import token_pass as token_pass_module
from posttrain.backends.rollout.native.decoder import Decoder
from posttrain.backends.rollout.native.kernels import Kernels, PassKernels
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.errors import ModelError
from posttrain.models.attention import NAME, register_attention
from posttrain.models.experts import multiply_any_width
from posttrain.models.packed_attention import continued_layout, packed_layout

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LATENTS = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "head_dim": 6,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAST = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma": {},
    "gemma2": SLIDING | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 20, "rope_local_base_freq": 100.0},
    "phi": {"partial_rotary_factor": 0.5},  # attention and MLP beside each other
    "phi3": {"partial_rotary_factor": 0.75, "head_dim": 24, "num_attention_heads": 2, "hidden_size": 48},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},  # norms after, and over all heads
    "olmo3": SLIDING,
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "olmoe": {"hidden_size": 64, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 20,
        "moe_intermediate_size": 24,
    },
    "cohere": {},  # neighbouring numbers are rotated
    "glm": {"partial_rotary_factor": 0.5},  # and some of a head's only
    "ernie4_5": {"use_bias": True},
    "gpt2": {"hidden_size": 64, "num_key_value_heads": 4},  # vectors of positions, weights the other way round
    "gpt_neox": {"hidden_size": 64, "num_key_value_heads": 4},  # queries, keys and values of a head side by side
    "granitemoe": {"num_local_experts": 3, "num_experts_per_tok": 2, "residual_multiplier": 0.3},
    # Norms over all heads, a bias for the choice only
    "minimax_m2": {"num_local_experts": 3, "num_experts_per_tok": 2},
    # Sinks, angles that stand once, experts with biases and an activation of their own
    "gpt_oss": SLIDING | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {},  # norms behind the position embedding
    "deepseek_v3": LATENTS | ROUTED,
    "deepseek_v2": LATENTS | ROUTED | {"q_lora_rank": None},
    "minicpm3": LATENTS,
}
BY_MODULES = {"opt": "OPTDecoder does not consist of"}
SHARING = {
    "glm4_moe": ROUTED | {"num_hidden_layers": 3},
    "dots1": ROUTED | {"n_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 3, "moe_topk": 2},
    "glm4_moe_lite": LATENTS | ROUTED,
    "youtu": LATENTS,
}  # an expert of all rows
SIZES_OF = FAST | SHARING | {"opt": {"head_dim": 8, "num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}}
ODD = {
    "head of 80, three queries a key": {
        "head_dim": 80,
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "head of 96, one query a key": {"head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 2},
    "head of 256, seven queries a key": {
        "head_dim": 256,
        "hidden_size": 42,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
    },
    "head of 20, no multiple of the kernels' 16": {"head_dim": 20},
    "widths that are no multiples of 16": {
        "head_dim": 16,
        "hidden_size": 52,
        "intermediate_size": 67,
        "vocab_size": 101,
    },
}
PROMPT, STEPS = 5, 12  # past the windows of 6


def build(family: str, dtype: torch.dtype = torch.float32, **more: object) -> PreTrainedModel:
    register_attention()
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **(SIZES | more))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # biases and norms, too
    multiply_any_width(model)
    return model.to(dtype)


@torch.inference_mode()
def follow(model: PreTrainedModel, token_pass: TokenPass, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after every token behind the prompt, one pass for each, [STEPS, vocabulary]."""
    cache = token_pass.new_cache()
    cache.prefilling([(0, PROMPT, 0, 0)])
    places = torch.arange(PROMPT + STEPS)
    prompt = {"input_ids": tokens[None, :PROMPT], "position_ids": places[None, :PROMPT]}
    found = []
    with token_pass.holding_weights():
        token_pass.prefill(prompt, packed_layout([PROMPT]), cache, torch.tensor([PROMPT - 1]), None)
        for step in range(STEPS):
            cache.decoding([0], [PROMPT], [step])
            now = slice(PROMPT + step, PROMPT + step + 1)
            found.append(token_pass.logits(token_pass(tokens[now], places[now], cache)))
    return torch.cat(found)


def packed_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(len(tokens))
    layout = packed_layout([len(tokens)])
    with torch.inference_mode():
        output = model(input_ids=tokens[None], position_ids=places[None], attention_layout=layout, use_cache=False)
    return output.logits[0, PROMPT:]


@pytest.mark.parametrize("family", [*FAST, *SHARING, *BY_MODULES])
def test_every_family_gives_the_models_own_logits(family: str) -> None:
    model = build(family, **SIZES_OF.get(family, {}))
    token_pass = TokenPass(model)
    assert (token_pass.decoder is None) == (family in BY_MODULES), token_pass.note
    assert BY_MODULES.get(family, "") in token_pass.note
    assert ("own modules" in token_pass.note) == (family in BY_MODULES)
    tokens = torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(follow(model, token_pass, tokens), packed_logits(model, tokens), rtol=1e-4, atol=2e-5)


# Families that no list of the project names, by whatever way they take; no width of a product is a multiple of 8.
FURTHER = [
    "apertus", "arcee", "cohere2", "exaone4", "glm4", "glm4_moe",
    "granitemoe", "hunyuan_v1_dense", "minimax_m2", "nanochat", "phimoe", "seed_oss", "vaultgemma",
]  # fmt: skip


@pytest.mark.parametrize("family", FURTHER)
def test_further_families_have_the_logits_of_transformers(family: str) -> None:
    """Decoded over the cache, and packed, against transformers' own attention over the whole sequence."""
    odd = {"hidden_size": 44, "intermediate_size": 51, "num_experts": 3, "num_local_experts": 3, "moe_num_experts": 3}
    sizes = odd | ROUTED | {"num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 13}
    known = vars(AutoConfig.for_model(family))
    model = build(family, **{name: size for name, size in sizes.items() if name in known})
    tokens = torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(2))
    packed, cached = packed_logits(model, tokens), follow(model, TokenPass(model), tokens)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        own = model(input_ids=tokens[None], use_cache=False).logits[0, PROMPT:]
    torch.testing.assert_close(packed, own, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(cached, own, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", ODD)
def test_odd_shapes_take_the_kernels(family: str, dtype: torch.dtype, odd: str) -> None:
    """No farther from float32 than the model's own modules, but for a share of its rounding."""
    model = build(family, dtype, **FAST[family] | ODD[odd])
    token_pass = TokenPass(model)
    assert token_pass.decoder is not None and token_pass.decoder.kernels is not None and not token_pass.note
    tokens = torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(2))
    got, own = follow(model, token_pass, tokens), packed_logits(model, tokens)
    exact = packed_logits(model.float(), tokens)
    assert (got - exact).norm() <= (1e-4 * exact.norm() if dtype is torch.float32 else 1.5 * (own - exact).norm())


def test_heads_narrower_than_the_kernels_are_reported() -> None:
    token_pass = TokenPass(build("qwen3", head_dim=8))
    assert token_pass.decoder is not None and token_pass.decoder.kernels is not None
    assert "attention goes without compiled kernels, which is slower: heads of 8 numbers" in token_pass.note


@torch.inference_mode()
def prefilled(token_pass: TokenPass, prompts: list[torch.Tensor], known: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill prompts together, their first ``known`` tokens before the others. Returns: logits at their ends, and the log-probs
    of the tokens after the known ones, but the first."""
    cache = token_pass.new_cache()
    with token_pass.holding_weights():
        for first, last in ((0, known), (known, None)):
            cut = [prompt[first:last] for prompt in prompts]
            ends = torch.tensor([len(each) for each in cut]).cumsum(0)
            if not ends[-1]:
                continue
            parts = [
                (int(end) - len(each), int(end), slot, first)
                for slot, (end, each) in enumerate(zip(ends, cut, strict=True))
            ]
            cache.prefilling(parts)
            tokens, places = torch.cat(cut), torch.cat([first + torch.arange(len(each)) for each in cut])
            inputs = {"input_ids": tokens[None], "position_ids": places[None]}
            layout = continued_layout([(first, len(each)) for each in cut])
            logits, _, _ = token_pass.prefill(inputs, layout, cache, ends - 1, None)
        _, logprobs, _ = token_pass.prefill(inputs, layout, cache, ends - 1, tokens.roll(-1))
    assert logprobs is not None
    return logits, torch.cat([logprobs[start : end - 1] for start, end, _, _ in parts])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("known", [0, 7])
def test_prefill_gives_the_models_own_logits(
    family: str, dtype: torch.dtype, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, some of which hold the end of one prompt and the beginning of the next. In bfloat16, no farther from float32
    than the model itself, but for its rounding."""
    monkeypatch.setattr(decoder_module, "PREFILL_ROWS", 10)
    model = build(family, dtype, **FAST[family])
    token_pass = TokenPass(model)
    assert token_pass.decoder is not None, token_pass.note
    monkeypatch.setattr(model, "forward", None)  # by the fast pass alone
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 64, (count,), generator=generator) for count in (9, 23, 8)]
    got, logprobs = prefilled(token_pass, prompts, known)
    monkeypatch.undo()
    exact, own = model.float(), build(family, dtype, **FAST[family])
    every, of_model = [], []
    for prompt in prompts:
        places, layout = torch.arange(len(prompt))[None], packed_layout([len(prompt)])
        given = {"input_ids": prompt[None], "position_ids": places, "attention_layout": layout, "use_cache": False}
        with torch.inference_mode():
            every.append(exact(**given).logits[0])
            of_model.append(own(**given).logits[0])
    ends = torch.stack([each[-1] for each in every])
    distance, of_own = (got - ends).norm(), (torch.stack([each[-1] for each in of_model]) - ends).norm()
    assert distance <= (1e-4 * ends.norm() if dtype is torch.float32 else 2 * of_own)
    expected, of_own = (
        torch.cat(
            [
                logits[known:-1].float().log_softmax(1).gather(1, prompt[known + 1 :, None])[:, 0]
                for logits, prompt in zip(found, prompts, strict=True)
            ]
        )
        for found in (every, of_model)
    )
    if dtype is torch.float32:
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    else:
        assert (logprobs - expected).norm() <= 2 * (of_own - expected).norm()


@pytest.mark.parametrize("family", [*FAST, *BY_MODULES])
@torch.inference_mode()
def test_sequences_that_share_their_beginning_have_the_models_own_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven shared tokens are prefilled once, in the same pass as the 9, 2 and 12 after them; windows are 6. Then a token is
    decoded for each, over what the pass has stored."""
    monkeypatch.setattr(decoder_module, "PREFILL_ROWS", 5)
    model = build(family, **SIZES_OF.get(family, {}))
    token_pass = TokenPass(model)
    cache = token_pass.new_cache()
    tokens = torch.randint(0, 64, (33,), generator=torch.Generator().manual_seed(3))
    stem, *rests = tokens.split([7, 10, 3, 13])
    row = torch.cat([stem, *(rest[:-1] for rest in rests)])
    places = torch.cat([torch.arange(7), *(7 + torch.arange(len(rest) - 1) for rest in rests)])
    parts = [(0, 7, 0, 0), (7, 16, 0, 7), (16, 18, 1, 7), (18, 30, 2, 7)]
    with token_pass.holding_weights():
        cache.prefilling(parts, [(0, 1, 7), (0, 2, 7)], split=7)
        inputs = {"input_ids": row[None], "position_ids": places[None]}
        layout = continued_layout([(known, end - start) for start, end, _, known in parts])
        ends, _, _ = token_pass.prefill(inputs, layout, cache, torch.tensor([15, 17, 29]), None)
        lengths = [16, 9, 19]
        cache.decoding([0, 1, 2], lengths, [0, 0, 0])
        newest = torch.stack([rest[-1] for rest in rests])
        after = token_pass.logits(token_pass(newest, torch.tensor(lengths), cache))
    expected = [packed_logits(model, torch.cat([stem, rest]))[-2:] for rest in rests]
    torch.testing.assert_close(ends, torch.stack([each[0] for each in expected]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after, torch.stack([each[1] for each in expected]), atol=1e-5, rtol=1e-4)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
ROUTED_ODD = ROUTED | {"n_routed_experts": 3, "moe_intermediate_size": 13, "n_shared_experts": 1}
LATENTS_ODD = LATENTS | {
    "hidden_size": 45,
    "num_key_value_heads": 3,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 9,
    "qk_rope_head_dim": 10,
    "v_head_dim": 11,
    "head_dim": 10,
}
WIDTHS_ODD = {"hidden_size": 44, "intermediate_size": 37, "num_attention_heads": 3}
ODD_FAMILIES = {
    "gpt-oss": (
        "gpt_oss",
        WIDTHS_ODD
        | {"num_key_value_heads": 1, "head_dim": 20, "num_local_experts": 5, "num_experts_per_tok": 2}
        | SLIDING
        | {"rope_parameters": YARN},
    ),
    "gpt-neox, one after the other": (
        "gpt_neox",
        WIDTHS_ODD
        | {"hidden_size": 75, "num_key_value_heads": 3, "head_dim": 25, "use_parallel_residual": False}
        | {"attention_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
    ),
    "gpt2": (
        "gpt2",
        {
            "hidden_size": 75,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 25,
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 41,
        },
    ),
    "deepseek-v3, halves": (
        "deepseek_v3",
        WIDTHS_ODD
        | LATENTS_ODD
        | ROUTED_ODD
        | {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": YARN},
    ),
    "deepseek-v3, neighbours": ("deepseek_v3", WIDTHS_ODD | LATENTS_ODD | ROUTED_ODD),
    "deepseek-v2": ("deepseek_v2", WIDTHS_ODD | LATENTS_ODD | ROUTED_ODD | {"kv_lora_rank": 14, "qk_nope_head_dim": 8}),
    "hunyuan": ("hunyuan_v1_dense", WIDTHS_ODD | {"num_key_value_heads": 1, "head_dim": 22}),
    "granite": (
        "granitemoe",
        WIDTHS_ODD | {"num_attention_heads": 2, "head_dim": 22, "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "minimax": (
        "minimax_m2",
        WIDTHS_ODD | {"num_key_value_heads": 1, "head_dim": 26, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", ODD_FAMILIES)
def test_families_of_odd_shapes_are_as_near_as_their_modules(odd: str, dtype: torch.dtype) -> None:
    """Beside float64 of transformers' own attention, with sharp position embeddings: large queries and keys."""
    family, sizes = ODD_FAMILIES[odd]
    model = build(family, dtype, **sizes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj", "query_key_value", "c_attn")):
                weight.mul_(3)
    token_pass = TokenPass(model)
    assert token_pass.decoder is not None and token_pass.decoder.kernels is not None and not token_pass.note
    tokens = torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(2))
    got, own = follow(model, token_pass, tokens), packed_logits(model, tokens)
    model.double().set_attn_implementation("eager")
    with torch.inference_mode():
        exact = model(input_ids=tokens[None], use_cache=False).logits[0, PROMPT:]
    assert (got - exact).norm() <= (1e-4 * exact.norm() if dtype is torch.float32 else 1.5 * (own - exact).norm())


def test_latent_vectors_are_read_by_torch_where_the_kernels_are_those_of_another_device() -> None:
    decoder = Decoder(build("deepseek_v3", **FAST["deepseek_v3"]), cast(PassKernels, SimpleNamespace(narrowest=1)))
    assert decoder.unused_attention == "there are none for latent vectors on this device"
    assert not decoder.compiled_attention


def test_kernels_and_torch_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that kernels are for: norms, attention, gated activations."""
    model = build("llama")
    tokens = torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(2))
    token_pass = TokenPass(model)
    assert token_pass.decoder is not None
    if token_pass.decoder.kernels is None:
        pytest.skip(token_pass.note)
    asked: set[str] = set()
    for name in ("norm", "gated", "attend"):
        monkeypatch.setattr(Kernels, name, noting(asked, getattr(Kernels, name), name))
    got = follow(model, token_pass, tokens)
    assert asked == {"norm", "gated"}  # the prompt's and the last norm; a token's others are called by compiled code
    token_pass._listed = None
    assert torch.equal(got, follow(model, token_pass, tokens))
    assert asked == {"norm", "gated", "attend"}
    monkeypatch.setattr(token_pass_module, "load_kernels", lambda dtype: "not today")
    without = TokenPass(model)
    assert without.note == "sampling goes without compiled kernels, which is slower: not today"
    torch.testing.assert_close(got, follow(model, without, tokens), rtol=1e-4, atol=2e-5)


def noting(asked: set[str], method: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    def noted(*args: object, **named: object) -> torch.Tensor:
        asked.add(name)
        return method(*args, **named)

    return noted


@pytest.mark.parametrize("family", FAST)
def test_bfloat16_takes_the_fast_pass_and_is_as_near_as_rounding_allows(family: str) -> None:
    model = build(family, torch.bfloat16, **FAST[family])
    token_pass = TokenPass(model)
    assert token_pass.decoder is not None, token_pass.note
    tokens = torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(2))
    got, expected = follow(model, token_pass, tokens), packed_logits(model, tokens)
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_model_that_computes_something_else_is_found_out() -> None:
    """The same parts put together in another way: a layer that scales what it adds."""
    model = build("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 1.5 * type(mlp).forward(mlp, x)
    token_pass = TokenPass(model)
    assert "layer 1 of LlamaForCausalLM gives another result" in token_pass.note
    tokens = torch.randint(0, 64, (PROMPT + STEPS,))
    torch.testing.assert_close(follow(model, token_pass, tokens), packed_logits(model, tokens), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_model_that_keeps_more_than_keys_and_values_is_refused(family: str) -> None:
    """A layer that adds the state of the token before, as a convolution does, has none after a cached prompt."""
    model = build(family, **SIZES_OF.get(family, {}))

    def with_the_token_before(layer: object, given: object, states: torch.Tensor) -> torch.Tensor:
        between = torch.arange(states.shape[1])[:, None] % 3 > 0  # not over the end of a packed sequence
        return states + torch.where(between, states.roll(1, dims=1), 0.0)

    model.get_decoder().layers[0].register_forward_hook(with_the_token_before)
    with pytest.raises(ModelError, match="gives a token after a cached prompt other logits than in a pass over both"):
        TokenPass(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_now(dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    token_pass = TokenPass(model)
    tokens = torch.randint(0, 64, (PROMPT + STEPS,))
    before = follow(model, token_pass, tokens)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-3.0)
    after = follow(model, token_pass, tokens)
    assert not torch.allclose(after, before, atol=0.1)
    expected = packed_logits(model, tokens)
    assert (after - expected).norm() < (1e-4 if dtype is torch.float32 else 0.05) * expected.norm()


@pytest.mark.parametrize("family", ["llama", "youtu", "gpt_neox", "gpt2"])
def test_adapter_is_applied(family: str) -> None:
    pytest.importorskip("peft")
    from posttrain.config.lora import LoraConfig
    from posttrain.models.lora import add_adapter

    model = build(family, **SIZES_OF[family])
    tokens = torch.randint(0, 64, (PROMPT + STEPS,))
    plain = follow(model, TokenPass(model), tokens)
    add_adapter(model, LoraConfig(rank=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    token_pass = TokenPass(model)
    assert (token_pass.decoder is None) == (family in BY_MODULES), token_pass.note
    got = follow(model, token_pass, tokens)
    torch.testing.assert_close(got, packed_logits(model, tokens), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(got, plain, atol=0.1)
