"""Fused layers give the numbers of the layers that they stand in for, forward and backward."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from posttrain.libraries.cpu_kernels import load
from posttrain.libraries.cpu_kernels.load import load_update_kernels, without_kernels
from posttrain.models.attention import NAME, register_attention
from posttrain.models.fused_functions import rms_norm
from posttrain.models.fused_layers import fuse_layers
from posttrain.models.packed_attention import shared_layout
from posttrain.models.tiny import draw_weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
# Norms of a model: two per layer and a last one; Qwen3 has two more per layer, on queries and keys; Gemma 3 has four and two.
NORMS = {"llama": 5, "mistral": 5, "qwen2": 5, "qwen3": 9, "gemma": 5, "gemma2": 9, "gemma3_text": 13}
NORMS |= {"granite": 5, "mixtral": 5, "phi3": 5, "qwen2_moe": 5, "qwen3_moe": 9, "smollm3": 5}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run of another test has set, and afterwards again."""
    monkeypatch.setattr(load, "_allowed", True)


def build(family: str, dtype: torch.dtype, seed: int = 1) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random model twice."""
    register_attention()
    config = AutoConfig.for_model(family, **SIZES)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    draw_weights(plain, seed=seed)
    return copy.deepcopy(plain).to(dtype), plain.to(dtype)


def logits_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a row with a shared prompt, in float64."""
    groups = [(5, (3, 4)), (7, ())]
    tokens = torch.arange(19)[None] * 3 % 64
    positions = torch.tensor([[*range(5), *range(5, 8), *range(5, 9), *range(7)]])
    layout = shared_layout(groups)
    logits = model(input_ids=tokens, position_ids=positions, attention_layout=layout, use_cache=False).logits.double()
    (logits.log_softmax(-1)[0, :, 5] * torch.linspace(0.5, 2, 19)).sum().backward()
    return logits.detach(), {name: weight.grad.double() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("family", NORMS)
def test_fused_model_is_the_model(family: str) -> None:
    fused, plain = build(family, torch.float32)
    fuse_layers(fused)
    norms = [module for name, module in fused.named_modules() if "norm" in name.rpartition(".")[2]]
    assert len(norms) == NORMS[family] and all("forward" in module.__dict__ for module in norms)
    (mine, my_grads), (theirs, their_grads) = logits_and_gradients(fused), logits_and_gradients(plain)
    assert (mine - theirs).norm() < 1e-5 * theirs.norm()
    for name, grad in their_grads.items():
        assert (my_grads[name] - grad).norm() < 1e-5 * grad.norm() + 1e-6, name


@pytest.mark.parametrize(
    "family", sorted(NORMS.keys() - {"mixtral", "qwen2_moe", "qwen3_moe"})
)  # torch has no experts in float64
def test_bfloat16_is_no_further_from_the_truth(family: str) -> None:
    """Each way rounds to bfloat16 at other places, so they differ by as much as both differ from float64."""
    errors = torch.tensor([rounding_errors(family, seed) for seed in range(5)])
    # Of single models they differ by up to a half, in both directions.
    times = errors[:, ::2] / errors[:, 1::2]
    assert times.median(dim=0).values.max() < 1.25
    assert errors.median(dim=0).values.max() < 0.1


def rounding_errors(family: str, seed: int) -> tuple[float, ...]:
    """Relative distances to float64, of logits and of gradients, each of the fused and then of the plain model."""
    fused, plain = build(family, torch.bfloat16, seed)
    fuse_layers(fused)
    true, true_grads = logits_and_gradients(copy.deepcopy(plain).double())

    def errors(model: PreTrainedModel) -> tuple[float, float]:
        logits, grads = logits_and_gradients(model)
        off = torch.cat([(grads[name] - grad).flatten() for name, grad in true_grads.items()])
        size = torch.cat([grad.flatten() for grad in true_grads.values()])
        return float((logits - true).norm() / true.norm()), float(off.norm() / size.norm())

    mine, theirs = errors(fused), errors(plain)
    return mine[0], theirs[0], mine[1], theirs[1]


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[3.0, -4.0]], requires_grad=True)
    weight = torch.tensor([2.0, 10.0], requires_grad=True)
    output = rms_norm(x, weight, 0.5)  # mean(x^2) + eps = 12.5 + 0.5 = 13
    rms = 13**0.5
    assert output.tolist()[0] == pytest.approx([6 / rms, -40 / rms])
    output[0, 0].backward()
    # d(2 x0 / rms)/dx0 = 2 / rms - 2 x0 * (x0 / 2) / rms^3 * ... with d rms/dx0 = x0 / (2 rms): 2 / rms - 6 * 1.5 / 13^1.5
    assert x.grad[0, 0].item() == pytest.approx(2 / rms - 6 * 1.5 / 13**1.5)
    assert x.grad[0, 1].item() == pytest.approx(6 * 2 / 13**1.5)  # - 6 * (-4 / 2) / rms^3
    assert weight.grad.tolist() == pytest.approx([3 / rms, 0.0])


def test_gradients_are_the_slopes() -> None:
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight, 1e-3))
    turned = x.detach().transpose(0, 1).requires_grad_()  # as queries are
    assert torch.autograd.gradcheck(rms_norm, (turned, weight.detach(), 1e-3))


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    spoilt = x.detach().clone()
    spoilt[1, 2] = torch.nan
    spoilt.requires_grad_()
    for each in (x, spoilt):
        rms_norm(each, torch.ones(4), 1e-6)[[0, 2]].square().sum().backward()
    assert torch.equal(spoilt.grad[[0, 2]], x.grad[[0, 2]])


def test_what_computes_something_else_is_left_alone() -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    class WithGate(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            return super().forward(hidden_states)

    model = torch.nn.Sequential(Doubled(4), WithGate(4), torch.nn.LayerNorm(4))
    assert fuse_layers(model) == 0
    assert not any("forward" in module.__dict__ for module in model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "phi3", "olmo2", "cohere"])
def test_mlps_and_position_embeddings_by_kernels(family: str) -> None:
    """All but Cohere's, which turns neighbours; and the model without its kernels afterwards."""
    fused, plain = build(family, torch.float32)
    if load_update_kernels(torch.float32).__class__ is str:
        pytest.skip("no kernels")
    fuse_layers(fused)
    layer = fused.get_decoder().layers[0]
    assert "forward" in layer.mlp.__dict__
    assert ("forward" in layer.self_attn.__dict__) == (family != "cohere")
    expected, _ = logits_and_gradients(plain)
    found, _ = logits_and_gradients(fused)
    with without_kernels():
        fused.zero_grad()
        again, _ = logits_and_gradients(fused)
    assert (found - expected).norm() < 1e-5 * expected.norm() and (again - expected).norm() < 1e-5 * expected.norm()


def test_a_norm_in_another_precision_computes_as_before() -> None:
    norm = LlamaRMSNorm(4)
    x = torch.randn(2, 4).bfloat16()
    wanted = norm(x)
    fuse_layers(norm)
    assert wanted.dtype == torch.float32 and torch.equal(norm(x), wanted)


def test_a_fused_model_is_saved_and_copied_like_any(tmp_path: Path) -> None:
    fused, _ = build("llama", torch.float32)
    fuse_layers(fused)
    fused.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(6)[None]
    layout = shared_layout([(6, ())])
    torch.testing.assert_close(
        fused(input_ids=tokens, attention_layout=layout, use_cache=False).logits, again(input_ids=tokens).logits
    )
