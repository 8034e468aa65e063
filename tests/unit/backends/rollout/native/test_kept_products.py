"""Copies of weights are kept between streams, and never used once the weights are others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.rollout.native import products as native_products
from posttrain.backends.rollout.native.kept_products import KeptProducts
from posttrain.backends.rollout.native.products import Product, copies_weights, stacked_product
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.config.lora import LoraConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams


def by_torch(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor[1] *= 2


def by_data(tensor: Tensor) -> None:
    tensor.data[1] *= 2


def by_compiled_code(tensor: Tensor) -> None:
    """Written to its memory: the first row becomes the last one."""
    row = tensor[0].numel() * tensor.element_size()
    ctypes.memmove(tensor.data_ptr(), tensor.data_ptr() + (len(tensor) - 1) * row, row)


def with_rows_exchanged(tensor: Tensor) -> None:
    tensor.data[[0, 1]] = tensor.data[[1, 0]]


CHANGES = [by_torch, by_data, by_compiled_code, with_rows_exchanged]


class Counting:
    """A ``Stack`` that copies, and counts its products."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Product:
        self.made += 1
        copy = torch.cat(list(weights)).clone()
        bias = torch.zeros(len(copy)) if biases[0] is None else biases[0].detach().clone()
        return lambda x: x @ copy.T + bias


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("width", [8, 6, 3])  # rows of 4 words, 3 words and 1.5
@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_only_what_has_changed_is_made_again(change: Callable[[Tensor], None], width: int, changed: str) -> None:
    stack = Counting()
    products = KeptProducts(stack)
    weights, bias = [torch.randn(4, width, requires_grad=True) for _ in range(3)], torch.randn(4)

    def read() -> list[Product]:
        products.begin()
        with torch.inference_mode():
            return [products([weight], [bias if number == 1 else None]) for number, weight in enumerate(weights)]

    first = read()
    assert read() == first and stack.made == 3
    change(weights[1] if changed == "weight" else bias)
    again = read()
    assert (again[0], again[2]) == (first[0], first[2]) and again[1] != first[1] and stack.made == 4
    x = torch.randn(2, width)
    with torch.inference_mode():
        torch.testing.assert_close(again[1](x), x @ weights[1].T + bias)
    products.clear()
    assert not set(read()) & set(again)


def test_products_that_hold_no_copies_read_the_weights_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_products, "product_kernels", lambda weight: None)
    products, weight = KeptProducts(stacked_product), torch.randn(4, 8)
    product = products([weight], [None])
    weight.zero_()
    assert not product(torch.randn(2, 8)).any()


def sampled(engine: NativeEngine) -> tuple[tuple[int, ...], tuple[float, ...]]:
    sampling = SamplingParams(max_response_tokens=12, temperature=0.0, ignore_eos=True)
    prompt = Prompt(prompt_id="p", token_ids=tuple(b"3+4="), text="3+4=", data_source="t")
    trajectory = engine.generate([prompt], sampling)[0].trajectories[0]
    return trajectory.token_ids, tuple(trajectory.logprobs)


def sampler(folder: Path, weights: str) -> NativeEngine:
    model, tokenizer = load_causal_lm(str(folder), dtype=torch.bfloat16), AutoTokenizer.from_pretrained(folder)
    options = {"max_concurrent_sequences": 4, "max_prefill_tokens": 64}
    return NativeEngine(model, tokenizer, weights=weights, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("weights", ["compute_dtype", "int8"])
def test_a_changed_weight_draws_other_tokens_though_nobody_told(
    tiny_qwen: Path, change: Callable[[Tensor], None], weights: str
) -> None:
    """The version of the weights stays 0, and the next stream samples as a sampler that starts with them."""
    engine = sampler(tiny_qwen, weights)
    before = sampled(engine)
    assert sampled(engine) == before
    for layer in engine.model.model.layers:
        for module in (layer.self_attn.v_proj, layer.mlp.down_proj):
            change(module.weight)
    fresh = sampler(tiny_qwen, weights)
    fresh.model.load_state_dict(engine.model.state_dict())
    after = sampled(engine)
    assert after != before and after == sampled(fresh)


def test_weights_are_packed_once_for_each_version(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sampler(tiny_qwen, "compute_dtype")
    decoder = engine.token_pass.decoder
    assert decoder is not None
    if not copies_weights([engine.model.lm_head.weight]):
        pytest.skip("the matrix library does not pack weights here")
    stack = Counting()
    decoder.products = KeptProducts(
        lambda weights, biases: (stack(weights, biases), stacked_product(weights, biases))[1]
    )
    made = []
    for version in (0, 0, 0, 1, 1):
        engine.weights_changed(version)  # as a run does that begins, too
        sampled(engine)
        made.append(stack.made)
    products = 4 * len(engine.model.model.layers) + 1
    assert made == [products, products, products, 2 * products, 2 * products]


def test_of_an_adapter_the_layers_that_it_changes_are_packed_again(tiny_qwen: Path) -> None:
    model = load_causal_lm(str(tiny_qwen), dtype=torch.bfloat16)
    add_adapter(model, LoraConfig(rank=2, target_modules=("down_proj",)), seed=0)
    token_pass = TokenPass(model)
    assert token_pass.decoder is not None
    stack = Counting()
    token_pass.decoder.products = KeptProducts(stack)
    made = []
    for _ in range(3):
        with torch.inference_mode(), token_pass.holding_weights():
            made.append(stack.made)
        if len(made) == 2:
            with torch.no_grad():
                model.get_decoder().layers[1].mlp.down_proj.lora_B["default"].weight += 1
    assert made[0] == made[1] == made[2] - 1
