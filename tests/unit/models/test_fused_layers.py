"""Fused layers give the numbers of the layers that they stand in for, forward and backward."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from posttrain.models.attention import NAME, register_attention
from posttrain.models.fused_layers import fuse_layers, rms_norm
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


def build(family: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random model twice."""
    register_attention()
    config = AutoConfig.for_model(family, **SIZES)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    draw_weights(plain, seed=1)
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
    assert fuse_layers(fused) == NORMS[family]
    (mine, my_grads), (theirs, their_grads) = logits_and_gradients(fused), logits_and_gradients(plain)
    assert (mine - theirs).norm() < 1e-5 * theirs.norm()
    for name, grad in their_grads.items():
        assert (my_grads[name] - grad).norm() < 1e-5 * grad.norm() + 1e-6, name


@pytest.mark.parametrize(
    "family", sorted(NORMS.keys() - {"mixtral", "qwen2_moe", "qwen3_moe"})
)  # torch has no experts in float64
def test_bfloat16_is_no_further_from_the_truth(family: str) -> None:
    """Each way rounds to bfloat16 at other places, so they differ by as much as both differ from float64."""
    fused, plain = build(family, torch.bfloat16)
    fuse_layers(fused)
    true, true_grads = logits_and_gradients(copy.deepcopy(plain).double())

    def errors(model: PreTrainedModel) -> tuple[float, float]:
        logits, grads = logits_and_gradients(model)
        off = torch.cat([(grads[name] - grad).flatten() for name, grad in true_grads.items()])
        size = torch.cat([grad.flatten() for grad in true_grads.values()])
        return float((logits - true).norm() / true.norm()), float(off.norm() / size.norm())

    mine, theirs = errors(fused), errors(plain)
    assert mine[0] < 1.2 * theirs[0] < 0.05
    assert mine[1] < 1.2 * theirs[1] < 0.1


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


def test_what_is_not_exactly_known_is_left_alone() -> None:
    class OwnNorm(LlamaRMSNorm):
        pass

    model = torch.nn.Sequential(OwnNorm(4), torch.nn.LayerNorm(4))
    assert fuse_layers(model) == 0
    assert "forward" not in model[0].__dict__


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
