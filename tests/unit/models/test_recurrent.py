"""Models whose layers keep a state: a sequence's numbers do not depend on what lies beside it, and sampling has the trainer's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.backends.rollout.native.engine import NativeEngine
from posttrain.backends.rollout.native.state_kernels import load_state_kernels
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.errors import ModelError
from posttrain.interfaces.rollout_engine import Request
from posttrain.models.attention import NAME, register_attention
from posttrain.models.packed_attention import packed_layout, shared_layout
from posttrain.models.recurrent import separate_sequences
from posttrain.models.tiny import draw_weights, tiny_tokenizer
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, Trajectory

TOKENIZER = tiny_tokenizer()
COMMON = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_dense_layers": 1,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,  # with experts
    "olmo_hybrid": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


# Widths of kernels: heads of keys and values that are no multiples of theirs
WIDE = {
    "hidden_size": 64,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 37,
}


def build(family: str, more: Mapping[str, int] = MappingProxyType({})) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model twice: ours, and transformers' with its own attention."""
    register_attention()
    known = vars(AutoConfig.for_model(family))
    sizes = {name: value for name, value in (COMMON | FAMILIES[family] | more).items() if name in known}
    config = AutoConfig.for_model(family, **sizes)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    draw_weights(plain, seed=1)
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=NAME).eval()
    ours.load_state_dict(plain.state_dict())
    separate_sequences(ours, "model.path")
    return ours, plain


def drawn(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 250, (length,), generator=generator) for length in lengths]


def alone(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_have_the_logits_and_gradients_of_each_alone(family: str) -> None:
    """Lengths that need padding, one of a single token, and of more than a chunk of 64."""
    ours, plain = build(family)
    sequences = drawn(9, 1, 70, 12)
    places = torch.cat([torch.arange(len(each)) for each in sequences])
    layout = packed_layout([len(each) for each in sequences])
    row = torch.cat(sequences)[None]
    got = ours(input_ids=row, position_ids=places[None], attention_layout=layout, use_cache=False).logits[0]
    expected = torch.cat([alone(plain, each) for each in sequences])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    for logits in (got, expected):
        logits.log_softmax(1)[:, 5].sum().backward()
    for (name, weight), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            assert weight.grad is not None and (weight.grad - other.grad).norm() <= 1e-3 * other.grad.norm() + 1e-5, (
                name
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_behind_a_shared_prompt_begin_with_its_state(family: str) -> None:
    """Groups of prompts of 7, 1 and 66 tokens; responses of one token among them. Gradients flow through the shared state."""
    ours, plain = build(family)
    groups = [(7, (4, 1, 9)), (1, (3, 3, 2)), (66, (1, 2, 1))]
    tokens = iter(drawn(*(count for prompt, responses in groups for count in (prompt, *responses))))
    row, places, expected = [], [], []
    for prompt, responses in groups:
        row.append(first := next(tokens))
        places.append(torch.arange(prompt))
        expected.append(alone(plain, first))
        for count in responses:
            row.append(rest := next(tokens))
            places.append(prompt + torch.arange(count))
            expected.append(alone(plain, torch.cat([first, rest]))[prompt:])
    inputs = {"input_ids": torch.cat(row)[None], "position_ids": torch.cat(places)[None]}
    got = ours(**inputs, attention_layout=shared_layout(groups), use_cache=False).logits[0]
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-3, atol=2e-4)
    for logits in (got, torch.cat(expected)):
        logits.log_softmax(1)[:, 5].sum().backward()
    for (name, weight), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            assert weight.grad is not None and (weight.grad - other.grad).norm() <= 1e-3 * other.grad.norm() + 1e-5, (
                name
            )


def check(plain: PreTrainedModel, prompt: tuple[int, ...], trajectory: Trajectory) -> None:
    """The response has the log-probs that the plain model gives its tokens."""
    tokens = torch.tensor([*prompt, *trajectory.token_ids])
    with torch.inference_mode():
        logprobs = alone(plain, tokens)[len(prompt) - 1 : -1].log_softmax(1)
    own = logprobs.gather(1, torch.tensor(trajectory.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(trajectory.logprobs), own, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_models_own(family: str) -> None:
    """Four slots for nine responses of three prompts: slots are freed, filled again, and moved with their states."""
    ours, plain = build(family)
    engine = NativeEngine(ours, TOKENIZER, max_concurrent_sequences=4, max_prefill_tokens=40)
    prompts = [
        Prompt(prompt_id=str(number), token_ids=tuple(tokens.tolist()), text="", data_source="")
        for number, tokens in enumerate(drawn(5, 19, 1))
    ]
    sampling = SamplingParams(samples_per_prompt=3, max_response_tokens=24, seed=3)
    for group in engine.generate(prompts, sampling):
        for trajectory in group.trajectories:
            check(plain, group.prompt.token_ids, trajectory)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampler_with_kernels_has_the_trainers_logprobs(family: str) -> None:
    """Widths that they compute: nothing goes through transformers' modules."""
    ours, _ = build(family, WIDE)
    engine = NativeEngine(ours, TOKENIZER, max_concurrent_sequences=5, max_prefill_tokens=400)
    if isinstance(reason := load_state_kernels(torch.float32), str):
        pytest.skip(reason)
    decoder = engine.token_pass.decoder
    assert not engine.note and decoder is not None and decoder.compiled_states and decoder.compiled_attention
    lengths = (5, 19, 600)  # the last one is cut into pieces
    prompts = [
        Prompt(prompt_id=str(number), token_ids=tuple(tokens.tolist()), text="", data_source="")
        for number, tokens in enumerate(drawn(*lengths))
    ]
    for group in engine.generate(prompts, SamplingParams(samples_per_prompt=3, max_response_tokens=20, seed=3)):
        prompt = group.prompt.token_ids
        for trajectory in group.trajectories:
            tokens = torch.tensor([*prompt, *trajectory.token_ids])
            inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens))[None]}
            with torch.inference_mode():
                logits = ours(**inputs, attention_layout=packed_layout([len(tokens)]), use_cache=False).logits[0]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(1)
            of_trainer = logprobs.gather(1, torch.tensor(trajectory.token_ids)[:, None])[:, 0]
            gaps = (of_trainer - torch.tensor(trajectory.logprobs)).abs()
            # Each of the two is up to 1e-5 from the same model in float64, in the mean of a response.
            assert gaps.mean() <= 2e-5 and gaps.max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_by_modules(family: str) -> None:
    """Logits of three prompts and of one token after each, of 1, 9 and 70 tokens; the same weights in float32."""
    ours, exact = (model.bfloat16() for model in build(family, WIDE))
    exact.float()
    token_pass = TokenPass(ours)
    if token_pass.decoder is None or token_pass.decoder.state_kernels is None:
        pytest.skip(token_pass.note)
    lengths, sequences = (1, 9, 70), drawn(2, 10, 71)
    expected = torch.stack([alone(exact, tokens)[end] for end in (-2, -1) for tokens in sequences])
    ends = torch.tensor(lengths).cumsum(0) - 1
    parts = [
        (int(end) + 1 - length, int(end) + 1, slot, 0)
        for slot, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
    row = torch.cat([tokens[:-1] for tokens in sequences])[None]
    inputs = {"input_ids": row, "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    newest, places = torch.stack([tokens[-1] for tokens in sequences]), torch.tensor(lengths)
    distances = []
    by_modules = TokenPass(ours)
    by_modules.decoder = None
    with torch.inference_mode(), token_pass.holding_weights():
        for way in (by_modules, token_pass):
            cache = way.new_cache()
            cache.prefilling(parts)
            first, _, _ = way.prefill(inputs, packed_layout(lengths), cache, ends, None)
            cache.decoding([0, 1, 2], lengths, [0, 0, 0])
            second = way.logits(way(newest, places, cache))
            distances.append((torch.cat([first, second]).float() - expected).norm())
    assert distances[1] <= 1.1 * distances[0]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_conversation_and_a_continued_response_go_on_from_their_states(family: str, compiled: bool) -> None:
    """Only what is new is prefilled. A turn that leaves out a part of the last one is prefilled whole: a state is of all
    tokens."""
    ours, plain = build(family)
    engine = NativeEngine(ours, TOKENIZER, max_concurrent_sequences=4, max_prefill_tokens=400)
    if not compiled:
        engine.token_pass.decoder = None
    prefilled: list[int] = []
    prefill = engine.token_pass.prefill

    def counted(inputs: dict[str, Any], *given: Any, **more: Any) -> Any:
        prefilled.append(inputs["input_ids"].numel())
        return prefill(inputs, *given, **more)

    engine.token_pass.prefill = counted  # type: ignore[method-assign]
    first = tuple(drawn(6)[0].tolist())
    with engine.open_stream(SamplingParams(max_response_tokens=8, ignore_eos=True)) as stream:
        stream.submit([Request("a", first, 8, conversation="talk")])
        (turn,) = stream.wait(60)
        check(plain, first, turn)
        second = (*first, *turn.token_ids, 65, 66)
        stream.submit([Request("b", second, 8, conversation="talk")])
        (turn,) = stream.wait(60)
        check(plain, second, turn)
        assert prefilled == [6, 3]  # the last token of the first turn, and two new ones
        third = (*second, *turn.token_ids[:3], 67)
        stream.submit([Request("c", third, 8, conversation="talk")])
        (turn,) = stream.wait(60)
        check(plain, third, turn)
        assert prefilled == [6, 3, len(third)]
        for passes in (1, 3):
            stream.submit([Request("d", first, 8)])
            for _ in range(passes):
                stream.step()  # type: ignore[attr-defined]
            (begun,) = stream.take_back(keep_cache=True)  # type: ignore[attr-defined]
            assert begun.cache is not None and len(begun.token_ids) == passes
            stream.submit([Request("d", first, 8, begun=begun)])
            (whole,) = stream.wait(60)
            check(plain, first, whole)
            assert prefilled[-2:] == [6, 1]


def test_layers_of_an_unknown_form_are_refused() -> None:
    """MiniMax's linear attention takes no such cache."""
    known = vars(AutoConfig.for_model("minimax"))
    sizes = {name: value for name, value in COMMON.items() if name in known}
    config = AutoConfig.for_model("minimax", **sizes, layer_types=LINEAR["layer_types"], num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(
        ModelError, match=r"the layers of MiniMaxForCausalLM at .* that keep a state are of an unknown form"
    ):
        separate_sequences(model, "model.path")


def test_a_sequence_is_not_split_over_devices() -> None:
    ours, _ = build("lfm2")
    row, places = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None]
    with pytest.raises(ModelError, match=r"layers that keep a state are not split over devices.*sequence_parallel=1"):
        ours(input_ids=row, position_ids=places, attention_layout=object(), use_cache=False)
