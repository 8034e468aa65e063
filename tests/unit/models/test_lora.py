"""Adapters on a model: what they compute, what is trained, what is saved, how they are merged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from adapters import adapted
from posttrain.config.lora import LoraConfig
from posttrain.errors import MissingDependency, ModelError
from posttrain.models import lora
from posttrain.models.loading import load_causal_lm
from posttrain.models.merging import merge_saved_adapter
from posttrain.models.packed_attention import packed_layout

peft = pytest.importorskip("peft")

QV = LoraConfig(rank=2, alpha=3.0, target_modules=["q_proj", "v_proj"])


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(40, 52)[None]
    positions = torch.arange(12)[None]
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, attention_layout=packed_layout([12])).logits[0]


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def test_new_adapter_changes_nothing_and_is_all_that_is_trained(tiny_qwen: Path) -> None:
    plain = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    lora.add_adapter(model, QV)
    assert torch.equal(logits(model), logits(plain))
    # Width 32, 4 heads of 8 and 2 key/value heads: A is 2 x 32, B is 32 x 2 and 16 x 2; 2 layers.
    assert sum(weight.numel() for weight in trained(model).values()) == 2 * (2 * 64 + 2 * 32 + 2 * 16)
    assert all("lora_" in name for name in trained(model))
    assert not model.training and not any(module.training for module in model.modules())
    assert lora.trained_share(model).startswith("LoRA trains 448 of ")


def test_effective_weight_is_base_plus_scaled_product(tiny_qwen: Path) -> None:
    model = adapted(tiny_qwen, QV)
    layer = model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    by_hand = layer.base_layer.weight + 1.5 * b @ a  # alpha / rank = 3 / 2
    torch.testing.assert_close(lora.effective_weight(layer), by_hand, rtol=1e-6, atol=1e-7)
    x = torch.randn(5, 32)
    torch.testing.assert_close(layer(x), x @ by_hand.T, rtol=1e-5, atol=1e-5)
    plain = model.model.layers[0].self_attn.k_proj
    assert lora.effective_weight(plain).data_ptr() == plain.weight.data_ptr()
    with lora.adapter_off(model):
        assert torch.equal(lora.effective_weight(layer), layer.base_layer.weight)


def test_bfloat16_sum_is_rounded_once(tiny_qwen: Path) -> None:
    layer = adapted(tiny_qwen, QV, torch.bfloat16).model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == torch.bfloat16
    exact = (layer.base_layer.weight.double() + 1.5 * b.double() @ a.double()).detach()
    found = lora.effective_weight(layer)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 1.01 * 2**-8 * exact.abs()).all()  # half a unit of 8 bits: 2^-8 at most


def test_rank_stabilised_scale(tiny_qwen: Path) -> None:
    model = adapted(tiny_qwen, LoraConfig(rank=4, alpha=6.0, use_rslora=True))
    assert model.model.layers[0].mlp.up_proj.scaling["default"] == 3.0  # 6 / sqrt(4)


def test_merged_weights_are_those_of_a_plain_model(tiny_qwen: Path) -> None:
    model = adapted(tiny_qwen, LoraConfig(rank=2))
    plain = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    merged = lora.merged_weights(model)
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


def test_without_its_adapter_the_model_is_the_base(tiny_qwen: Path) -> None:
    model, plain = adapted(tiny_qwen, QV), load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    with_adapter = logits(model)
    with lora.adapter_off(model):
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), with_adapter) and (with_adapter - logits(plain)).abs().max() > 0.1
    assert all(weight.requires_grad for name, weight in model.named_parameters() if "lora_" in name)


def test_dropout_acts_only_where_it_is_turned_on(tiny_qwen: Path) -> None:
    model = adapted(tiny_qwen, LoraConfig(rank=2, dropout=0.5))
    quiet = logits(model)
    assert torch.equal(logits(model), quiet)
    lora.drop_inputs(model, True)
    assert not torch.equal(logits(model), quiet)
    lora.drop_inputs(model, False)
    assert torch.equal(logits(model), quiet)


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        ("all-linear", None, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("all-linear", ["o_proj", "k_proj"], {"q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}),
        (["up_proj"], None, {"up_proj"}),
        (r".*layers\.1\..*\.(q|k)_proj", None, {"q_proj", "k_proj"}),
    ],
)
def test_which_layers_get_an_adapter(
    tiny_qwen: Path, targets: str | list[str], excluded: list[str] | None, expected: set[str]
) -> None:
    model = adapted(tiny_qwen, LoraConfig(rank=1, target_modules=targets, exclude_modules=excluded))
    assert {name.rpartition(".")[2] for name, _ in lora.adapter_layers(model)} == expected


def test_random_start_depends_on_the_seed_alone(tiny_qwen: Path) -> None:
    def start(seed: int) -> dict[str, Tensor]:
        torch.rand(7)
        model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
        lora.add_adapter(model, QV, seed=seed)
        return trained(model)

    one, same, other = start(1), start(1), start(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------------- saved and merged


@pytest.fixture
def saved(tiny_qwen: Path, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model, folder = adapted(tiny_qwen, QV), tmp_path / "adapter"
    folder.mkdir()
    lora.write_adapter(model, trained(model), folder, head=None)
    AutoTokenizer.from_pretrained(tiny_qwen).save_pretrained(folder)
    return model, folder


def test_saved_adapter_is_read_by_peft(saved: tuple[PreTrainedModel, Path], tiny_qwen: Path) -> None:
    model, folder = saved
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_qwen), folder).eval()
    with torch.no_grad():
        theirs = read(input_ids=torch.arange(40, 52)[None]).logits[0]
    torch.testing.assert_close(theirs, logits(model), rtol=1e-4, atol=1e-4)
    assert peft.PeftConfig.from_pretrained(folder).base_model_name_or_path == str(tiny_qwen.resolve())


def test_merged_export_is_base_plus_adapter(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, folder = saved
    merge_saved_adapter(folder, tmp_path / "out")
    merged, expected = load_file(tmp_path / "out" / "model.safetensors"), lora.merged_weights(model)
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_training_goes_on_from_a_saved_adapter(saved: tuple[PreTrainedModel, Path], tiny_qwen: Path) -> None:
    model, folder = saved
    again = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    lora.add_adapter(again, LoraConfig(adapter_path=str(folder)))
    mine, theirs = trained(model), trained(again)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ["nope"]}, "its linear layers are called down_proj, gate_proj, k_proj, lm_head, o_proj"),
        ({"adapter_path": "/nowhere"}, "no LoRA adapter could be read from /nowhere"),
    ],
)
def test_mistakes_are_explained(tiny_qwen: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        adapted(tiny_qwen, LoraConfig(**config))
    assert message in str(caught.value)
    assert caught.value.problems[0].field.startswith("policy.lora.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "it has use_dora, and only plain LoRA is trained"),
        ({"lora_bias": True}, "it has lora_bias, and only plain LoRA is trained"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "it has target_parameters, and only plain LoRA is trained"),
        ({"init_lora_weights": "pissa"}, "it began as pissa, which changes the base weights"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused(
    saved: tuple[PreTrainedModel, Path], tiny_qwen: Path, tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    """peft would train it, and a sampler that multiplies by base + scale x B A would sample from another model."""
    for file in (lora.WEIGHTS, lora.CONFIG):
        (tmp_path / file).write_bytes((saved[1] / file).read_bytes())
    plain = json.loads((tmp_path / lora.CONFIG).read_text())
    assert all(name in plain for name in lora.NOT_PLAIN)  # they are still called so
    (tmp_path / lora.CONFIG).write_text(json.dumps(plain | settings))
    with pytest.raises(ModelError, match=said):
        adapted(tiny_qwen, LoraConfig(adapter_path=str(tmp_path)))


def test_adapter_of_another_model_is_refused(saved: tuple[PreTrainedModel, Path], tiny_llama: Path) -> None:
    from transformers import AutoConfig

    _, folder = saved
    narrow = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_llama, hidden_size=16))
    with pytest.raises(ModelError, match="is of another model than"):
        lora.add_adapter(narrow, LoraConfig(adapter_path=str(folder)))


def test_output_layer_that_is_also_the_embedding_gets_none(tiny_llama: Path, tiny_qwen: Path) -> None:
    with pytest.raises(ModelError, match="shares its weights with the embedding"):
        adapted(tiny_llama, LoraConfig(target_modules=["lm_head"]))
    adapted(tiny_qwen, LoraConfig(target_modules=["lm_head"]))  # has one of its own


def test_base_that_is_gone_is_named(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, folder = saved
    config = folder / "adapter_config.json"
    text = config.read_text()
    base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
    config.write_text(text.replace(base, "/gone"))
    with pytest.raises(ModelError, match="cannot be merged into /gone"):
        merge_saved_adapter(folder, tmp_path / "out")


def test_without_peft_the_install_line_is_told(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    with pytest.raises(MissingDependency, match=r"pip install 'posttrain\[lora\]'"):
        lora.add_adapter(model, QV)
