"""What families do between hidden states and logits is found, or refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.algos.fused_scoring import score_logits, score_tokens
from posttrain.errors import ModelError
from posttrain.models.head import HeadForm, head_form, last_hidden_states, states_at
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import packed_layout
from posttrain.models.tiny import draw_weights

TOKENS = torch.tensor([[5, 1, 7, 30, 2, 9]])
INPUTS = {"input_ids": TOKENS, "position_ids": torch.arange(6)[None]}

# Every way of making logits that the families supported by our attention have.
FAMILIES: dict[str, tuple[str, dict[str, Any], HeadForm]] = {
    "llama": ("llama", {"tie_word_embeddings": True}, HeadForm()),
    "qwen2": ("qwen2", {}, HeadForm()),
    "qwen3": ("qwen3", {"head_dim": 8}, HeadForm()),
    "mistral": ("mistral", {"sliding_window": 4}, HeadForm()),
    "phi": ("phi", {}, HeadForm()),  # its output layer has a bias
    "gemma3": ("gemma3_text", {"head_dim": 8, "final_logit_softcapping": 5.0}, HeadForm(softcap=5.0)),
    "cohere": ("cohere", {"logit_scale": 0.0625}, HeadForm(scale=0.0625)),
    "granite": ("granite", {"logits_scaling": 8.0}, HeadForm(scale=0.125)),
}


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def make_model(folder: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family,
        **SIZES | options,
    )
    model = AutoModelForCausalLM.from_config(config)
    draw_weights(model, 0)
    model.save_pretrained(folder)
    return load_causal_lm(str(folder), dtype=dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_the_plain_model_call(tmp_path: Path, name: str) -> None:
    family, options, wanted = FAMILIES[name]
    model = make_model(tmp_path, family, **options)
    form = head_form(model)
    assert isinstance(form, HeadForm)
    assert (form.scale, form.softcap) == (pytest.approx(wanted.scale), wanted.softcap)

    layout = packed_layout([6])
    targets = torch.arange(6)
    logits = model(**INPUTS, attention_layout=layout, use_cache=False).logits[0]
    plain = score_logits(logits, targets, temperature=0.8)
    plain.logprobs.sum().backward()
    wanted_gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    hidden = last_hidden_states(model, layout, **INPUTS)[0]
    fused = score_tokens(hidden, form.of(model), targets, temperature=0.8)
    fused.logprobs.sum().backward()

    torch.testing.assert_close(fused.logprobs, plain.logprobs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(fused.entropy, plain.entropy, rtol=1e-6, atol=2e-6)
    for name, weight in model.named_parameters():
        assert (weight.grad - wanted_gradients[name]).norm() <= 1e-5 * wanted_gradients[name].norm() + 1e-7, name


def test_bfloat16_model_is_probed_alike(tmp_path: Path) -> None:
    assert head_form(make_model(tmp_path, "llama", torch.bfloat16)) == HeadForm()


def test_probing_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    linear = model.get_output_embeddings()
    head_form(model)
    assert not linear._forward_hooks
    assert all(weight.grad is None for weight in model.parameters())


def test_a_model_is_probed_once_and_again_with_another_output_layer(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    passes: list[None] = []
    model.register_forward_hook(lambda *_: passes.append(None))
    assert head_form(model) == head_form(model) == HeadForm() and len(passes) == 1
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    assert isinstance(head_form(model), str)


class _Odd(nn.Module):
    """A model that is a Llama but for what a test changes."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.base_model, self.config, self.device = model, model.base_model, model.config, model.device

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.logits = self.changed(output.logits)
        return output

    def changed(self, logits: Tensor) -> Tensor:
        return logits


class _Squared(_Odd):
    def changed(self, logits: Tensor) -> Tensor:
        return logits.square()


class _Unused(_Odd):
    def forward(self, **inputs: Any) -> Any:
        output = self.model.base_model(**inputs)
        output.logits = output.last_hidden_state @ self.model.lm_head.weight.T
        return output


class _Divided(_Odd):
    def forward(self, **inputs: Any) -> Any:
        output = self.model.base_model(**inputs)
        output.logits = self.model.lm_head(output.last_hidden_state / 2)
        return output


class _Shifted(_Odd):
    def forward(self, **inputs: Any) -> Any:
        output = self.model.base_model(**inputs)
        output.logits = self.model.lm_head(output.last_hidden_state.roll(1, dims=-1))
        return output


class _OtherLayer(_Odd):
    def get_output_embeddings(self) -> nn.Module:
        return nn.Sequential(self.model.lm_head)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_Squared, "it transforms its logits in an unknown way"),
        (_Unused, "its forward pass calls the output layer 0 times"),
        (_Shifted, "what enters its output layer is not the last hidden state of its body"),
        (_OtherLayer, "its output layer is Sequential, not a plain linear layer"),
    ],
)
def test_unknown_heads_are_told(tmp_path: Path, kind: type[_Odd], reason: str) -> None:
    assert head_form(kind(make_model(tmp_path, "llama"))) == reason  # type: ignore[arg-type]


def test_a_multiple_of_the_last_state_is_a_scale(tmp_path: Path) -> None:
    """MiniCPM3 divides what enters its output layer."""
    found = head_form(_Divided(make_model(tmp_path, "llama")))  # type: ignore[arg-type]
    assert isinstance(found, HeadForm) and found.scale == pytest.approx(0.5) and found.softcap is None


def test_cap_that_the_configuration_does_not_name_is_unknown(tmp_path: Path) -> None:
    class Capped(_Odd):
        def changed(self, logits: Tensor) -> Tensor:
            return 30 * torch.tanh(logits / 30)

    assert head_form(Capped(make_model(tmp_path, "llama"))) == "it transforms its logits in an unknown way"  # type: ignore[arg-type]


def test_a_model_whose_packed_sequences_change_each_other_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    mixed = model.base_model.layers[0].register_forward_hook(
        lambda module, given, states: states + states.mean(1, keepdim=True)
    )
    with pytest.raises(
        ModelError, match=f"LlamaForCausalLM at {tmp_path} computes a sequence otherwise when another one is pack"
    ):
        head_form(model)
    mixed.remove()
    assert head_form(model) == HeadForm()


def test_a_model_that_its_own_code_cannot_run_is_refused(tmp_path: Path) -> None:
    """The rotation of positions is that of pairs: a head of 5 numbers has half a pair too many."""
    with pytest.raises(
        ModelError, match=r"Qwen2ForCausalLM at .* cannot compute a few tokens: RuntimeError: The size of tensor"
    ):
        head_form(make_model(tmp_path, "qwen2", hidden_size=20))


def test_states_that_several_ask_for_have_the_same_gradient_every_time() -> None:
    """Row 0 is asked for 683 times, rows 1 and 2 as often: in float32 the order in which their gradients are added up shows in
    the last digits. With two threads, ``states[positions]`` gave 14 to 18 different gradients in 20 tries."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(64, 256, generator=generator, requires_grad=True)
        positions, factors = torch.arange(2048) % 3, torch.randn(2048, 256, generator=generator)
        assert torch.equal(states_at(states, positions), states[positions])
        found = set()
        for _ in range(10):
            states.grad = None
            (states_at(states, positions) * factors).sum().backward()
            assert states.grad is not None
            found.add(states.grad.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    exact = torch.zeros(64, 256, dtype=torch.float64).index_add_(0, positions, factors.double())
    torch.testing.assert_close(states.grad, exact.float(), rtol=1e-4, atol=1e-4)
