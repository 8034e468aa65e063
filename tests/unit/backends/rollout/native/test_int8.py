"""Weights of eight bits: rounded as by hand, multiplied as in float64, in every family of models."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.backends.rollout.native import NativeEngine, int8
from posttrain.backends.rollout.native.int8 import int8_products, quantize
from posttrain.backends.rollout.native.named_parts import attention_of, layers_of
from posttrain.backends.rollout.native.packed_products import Stack
from posttrain.backends.rollout.native.parts import mlp_of, router_of
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.errors import ConfigError, RunStopped
from posttrain.models.packed_attention import packed_layout
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams

sys.path.append(str(Path(__file__).parent))
from test_token_pass import BY_MODULES, FAST, PROMPT, SIZES_OF, STEPS, build, prefilled

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOKENS = torch.randint(0, 64, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(2))


def compiled(dtype: torch.dtype) -> Stack:
    stack, reason = int8_products(dtype, torch.device("cpu"))
    if reason:
        pytest.skip(reason)
    return stack


def rounded(weight: torch.Tensor) -> torch.Tensor:
    multiples, scales = quantize(weight)
    return multiples.float() * scales[:, None]


@torch.no_grad()
def round_model(model: PreTrainedModel) -> PreTrainedModel:
    """Round the weights of a model in place as the sampler rounds its copies: products, but no routers, gates, embeddings and
    products of latent vectors."""
    model.get_output_embeddings().weight = nn.Parameter(rounded(model.get_output_embeddings().weight))
    for layer in layers_of(model.get_decoder()):
        mlp = mlp_of(layer)
        kept = {router_of(mlp), getattr(mlp, "shared_expert_gate", None)}
        kept.add(getattr(attention_of(layer), "kv_b_proj", None))
        for module in layer.modules():
            if isinstance(module, nn.Linear | Conv1D) and module not in kept:
                weight = module.weight.T if isinstance(module, Conv1D) else module.weight
                weight.copy_(rounded(weight))
        if experts := getattr(mlp, "experts", None):
            for stacked in (experts.gate_up_proj, experts.down_proj):
                for weight in stacked:
                    weight = weight.T if experts.is_transposed else weight
                    weight.copy_(rounded(weight))
    return model


@torch.inference_mode()
def decoded(token_pass: TokenPass) -> torch.Tensor:
    """Logits after every token of TOKENS behind its prompt, [STEPS, vocabulary], by the fast passes alone."""
    cache, places = token_pass.new_cache(), torch.arange(PROMPT + STEPS)
    with token_pass.holding_weights():
        cache.prefilling([(0, PROMPT, 0, 0)])
        inputs = {"input_ids": TOKENS[None, :PROMPT], "position_ids": places[None, :PROMPT]}
        token_pass.prefill(inputs, packed_layout([PROMPT]), cache, torch.tensor([PROMPT - 1]), None)
        found = []
        for step in range(STEPS):
            cache.decoding([0], [PROMPT], [step])
            now = slice(PROMPT + step, PROMPT + step + 1)
            found.append(token_pass.logits(token_pass(TOKENS[now], places[now], cache)))
    return torch.cat(found)


@torch.inference_mode()
def all_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the model itself after every token, [tokens, vocabulary]."""
    places, layout = torch.arange(len(tokens))[None], packed_layout([len(tokens)])
    logits: torch.Tensor = model(
        input_ids=tokens[None], position_ids=places, attention_layout=layout, use_cache=False
    ).logits[0]
    return logits


def test_scales_and_multiples_by_hand() -> None:
    """The largest is 127 scales: 1.27 / 127 = 0.01, 2.54 / 127 = 0.02; 0.013 / 0.02 = 0.65 is 1 scale."""
    weight = torch.tensor([[0.5, -1.27, 0.003, 0.007], [0.0, 0.0, 0.0, 0.0], [2.54, 0.013, -0.5, 0.0]])
    multiples, scales = quantize(weight)
    torch.testing.assert_close(scales, torch.tensor([0.01, 0.0, 0.02]))
    assert multiples.tolist() == [[50, -127, 0, 1], [0, 0, 0, 0], [127, 1, -25, 0]]
    assert multiples.dtype == torch.int8


def test_rounding_is_within_half_a_step_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 50).bfloat16()
    whole = quantize(weight)
    assert ((rounded(weight) - weight.float()).abs() <= 0.5001 * whole[1][:, None]).all()
    monkeypatch.setattr(int8, "NUMBERS_AT_A_TIME", 120)  # two outputs
    assert all(torch.equal(one, other) for one, other in zip(quantize(weight), whole, strict=True))


@DTYPES
@pytest.mark.parametrize("inputs", [1, 33, 64, 1500])
@pytest.mark.parametrize("outputs", [1, 32, 75])
def test_products_are_those_of_float64(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """And a row's do not depend on how many others there are, to the bit."""
    stack = compiled(dtype)
    weights = [torch.randn(outputs, inputs).to(dtype), torch.randn(3, inputs).to(dtype)]
    biases = [None, torch.randn(3).to(dtype)]
    x = torch.randn(130, inputs).to(dtype)
    got = stack(weights, biases)(x)
    sums = x.double() @ torch.cat([rounded(weight) for weight in weights]).double().T
    sums[:, outputs:] += biases[1].double()
    size = sums.abs().max()
    allowed = size * (2**-8 if dtype is torch.bfloat16 else 1e-5)
    assert (got.double() - sums).abs().max() <= allowed
    product = stack(weights, biases)
    assert all(torch.equal(product(x[:rows]), got[:rows]) for rows in (*range(31), 95, 96, 97, 130))


@DTYPES
def test_torch_multiplies_the_same_weights(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, biases = [torch.randn(40, 96).to(dtype), torch.randn(24, 96).to(dtype)], [torch.randn(40).to(dtype), None]
    x = torch.randn(9, 96).to(dtype)
    expected = compiled(dtype)(weights, biases)(x)
    monkeypatch.setattr(int8, "load_product_kernels", lambda dtype, weights: "not today")
    stack, reason = int8_products(dtype, torch.device("cpu"))
    assert reason == "not today"
    close = {"rtol": 2**-7, "atol": 2**-6} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(stack(weights, biases)(x), expected, **close)


def test_weights_that_are_not_finite_show() -> None:
    """A rounding that hid them would let a run that has diverged go on."""
    weight = torch.randn(3, 8)
    weight[0, 1], weight[1, 2] = torch.nan, torch.inf
    for stack in (compiled(torch.float32), int8._by_torch):
        assert stack([weight], [None])(torch.ones(1, 8)).isfinite().tolist() == [[False, False, True]]


@pytest.mark.parametrize("family", FAST)
def test_every_family_gives_the_logits_of_a_rounded_model(family: str) -> None:
    model = build(family, **SIZES_OF[family])
    token_pass = TokenPass(model, int8=True)
    assert not token_pass.note or "heads of 8 numbers" in token_pass.note
    got, plain = decoded(token_pass), all_logits(model, TOKENS)[PROMPT:]
    expected = all_logits(round_model(deepcopy(model)), TOKENS)[PROMPT:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert 1e-4 * plain.norm() < (got - plain).norm() <= 0.1 * plain.norm()


def test_prompts_are_scored_with_the_rounded_weights() -> None:
    model = build("qwen2")
    logits, logprobs = prefilled(TokenPass(model, int8=True), [TOKENS], 0)
    expected = all_logits(round_model(deepcopy(model)), TOKENS)
    torch.testing.assert_close(logits[0], expected[-1], rtol=1e-4, atol=1e-4)
    scored = expected[:-1].log_softmax(1).gather(1, TOKENS[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, scored, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", [True, False])
def test_weights_are_rounded_again_when_they_change(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(int8, "load_product_kernels", lambda dtype, weights: "not today")
    model = build("llama")
    token_pass = TokenPass(model, int8=True)
    assert ("save no time without compiled kernels: not today" in token_pass.note) is not kernels
    before = decoded(token_pass)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-3.0)
    after = decoded(token_pass)
    assert not torch.allclose(after, before, atol=0.1)
    assert (after - all_logits(model, TOKENS)[PROMPT:]).norm() < 0.1 * after.norm()


def test_an_adapter_is_merged_before_weights_are_rounded() -> None:
    pytest.importorskip("peft")
    from posttrain.config.lora import LoraConfig
    from posttrain.models.lora import add_adapter

    model = build("llama")
    plain = decoded(TokenPass(model, int8=True))
    add_adapter(model, LoraConfig(rank=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    got = decoded(TokenPass(model, int8=True))
    expected = all_logits(model, TOKENS)[PROMPT:]
    assert (got - expected).norm() < 0.1 * expected.norm()
    assert not torch.allclose(got, plain, atol=0.1)


@pytest.mark.parametrize("family", BY_MODULES)
def test_models_without_a_fast_pass_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.weights=int8 needs the fast passes .* use\s+rollout.weights=comp"):
        TokenPass(build(family, **SIZES_OF.get(family, {})), int8=True)


def sampler(dtype: torch.dtype) -> NativeEngine:
    model = build("llama", dtype, vocab_size=259)
    return NativeEngine(model, tiny_tokenizer(), max_concurrent_sequences=8, max_prefill_tokens=300, weights="int8")


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(prompt_id=text, token_ids=tuple(text.encode()), text=text, data_source="t") for text in texts]


@DTYPES
def test_a_response_does_not_depend_on_the_others_to_the_bit(dtype: torch.dtype) -> None:
    """Alone, a pass has one row: no rows are filled up."""
    engine = sampler(dtype)
    if engine.token_pass.rows_for(1, 8) != 1:
        pytest.skip(engine.note)
    alone, among = (
        engine.generate(asked, SamplingParams(samples_per_prompt=1, max_response_tokens=20, seed=3, ignore_eos=True))
        for asked in (prompts("2+2="), prompts("2+2=", "what is the answer?", "a b c", "1"))
    )
    (one,), (other,) = alone[0].trajectories, among[0].trajectories
    assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_new_weights_are_sampled_with() -> None:
    """And log-probs are those of the rounded weights: near the trainer's, and not equal."""
    engine = sampler(torch.float32)
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=20, seed=3, ignore_eos=True)
    before = engine.generate(prompts("2+2="), sampling)
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.mul_(1.1)
    engine.weights_changed(1)
    after = engine.generate(prompts("2+2="), sampling)
    assert before[0].trajectories[0].logprobs != after[0].trajectories[0].logprobs
    for trajectory in after[0].trajectories:
        tokens = torch.tensor([*b"2+2=", *trajectory.token_ids])
        logits = all_logits(engine.model, tokens)
        own = logits.log_softmax(1)[3:-1].gather(1, tokens[4:, None])[:, 0]
        gap = (own - torch.tensor(trajectory.logprobs)).abs()
        assert 1e-6 < gap.mean() < 0.1 and trajectory.policy_version == 1


def test_diverged_weights_stop_the_run() -> None:
    engine = sampler(torch.float32)
    with torch.no_grad():
        engine.model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunStopped, match="not finite"):
        engine.generate(prompts("2+2="), SamplingParams(max_response_tokens=4))
