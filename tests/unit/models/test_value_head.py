"""Value heads: new ones, those of other checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from posttrain.errors import ModelError
from posttrain.models.packed_attention import shared_layout
from posttrain.models.tiny import draw_weights
from posttrain.models.value_head import is_derived, load_value_model, token_values, value_head


def with_head(source: Path, folder: Path, labels: int = 1) -> Path:
    """A token classification folder: the body of ``source`` and a random head."""
    model = AutoModelForTokenClassification.from_pretrained(source, num_labels=labels)
    draw_weights(model.score, 3)
    model.save_pretrained(folder)
    return folder


def values_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """At every token of one sequence."""
    return token_values(
        model,
        torch.arange(len(tokens)),
        input_ids=torch.tensor([tokens]),
        position_ids=torch.arange(len(tokens))[None],
        attention_layout=shared_layout(((len(tokens), ()),), torch.device("cpu")),
        use_cache=False,
    )


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
def test_a_causal_model_gets_a_head_of_zeros_and_keeps_its_body(request: pytest.FixtureRequest, folder: str) -> None:
    path = request.getfixturevalue(folder)
    model = load_value_model(str(path), dtype=torch.float32)
    head = value_head(model)
    assert (head.in_features, head.out_features) == (32, 1)
    assert not head.weight.any() and not head.bias.any()
    body = AutoModelForCausalLM.from_pretrained(path).base_model.state_dict()
    assert all(torch.equal(weight, body[name]) for name, weight in model.base_model.state_dict().items())
    assert torch.equal(values_of(model, [5, 6, 7]), torch.zeros(3))


def test_nothing_drops_out_and_the_global_random_state_decides_nothing(tiny_llama: Path) -> None:
    torch.manual_seed(1)
    first = load_value_model(str(tiny_llama), dtype=torch.float32)
    torch.manual_seed(2)
    second = load_value_model(str(tiny_llama), dtype=torch.float32)
    assert not any(module.training for module in first.modules())
    weights = second.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in first.state_dict().items())


def test_a_token_classification_model_keeps_its_head(tiny_qwen: Path, tmp_path: Path) -> None:
    """In float64, by transformers alone: the head's output at each token."""
    folder = with_head(tiny_qwen, tmp_path)
    model = load_value_model(str(folder), dtype=torch.float32)
    tokens = [5, 80, 7, 200, 9]
    plain = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0, :, 0]
        values = values_of(model, tokens)
    assert expected.abs().min() > 0.01 and expected.std() > 0.05
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_class_of_transformers_is_known_as_one(tiny_llama: Path) -> None:
    assert not is_derived(load_value_model(str(tiny_llama), dtype=torch.float32, of_sequences=True))


def test_a_reward_model_keeps_its_head(tiny_llama: Path, tmp_path: Path) -> None:
    """Sequence classification heads have no bias: it is 0."""
    reward = AutoModelForSequenceClassification.from_pretrained(tiny_llama, num_labels=1)
    reward.save_pretrained(tmp_path)
    head = value_head(load_value_model(str(tmp_path), dtype=torch.float32))
    assert torch.equal(head.weight, reward.score.weight) and head.weight.any()
    assert head.bias.tolist() == [0.0]


def test_the_head_is_float32_in_a_bfloat16_model(tiny_qwen: Path, tmp_path: Path) -> None:
    """bfloat16 has 8 bits: around 100 its neighbours are 0.5 apart, and a head that computed in it would give such steps."""
    folder = with_head(tiny_qwen, tmp_path)
    model = load_value_model(str(folder), dtype=torch.bfloat16)
    head = value_head(model)
    assert {weight.dtype for weight in model.base_model.parameters()} == {torch.bfloat16}
    assert head.weight.dtype == head.bias.dtype == torch.float32
    with torch.no_grad():
        before = values_of(model, [5, 6])
        head.bias.add_(100.0)
        after = values_of(model, [5, 6])
    assert after.dtype == torch.float32
    torch.testing.assert_close(after - before, torch.full((2,), 100.0), rtol=0, atol=1e-4)


def test_an_architecture_without_the_class_gets_one_that_loads_again(tmp_path: Path) -> None:
    """transformers has no Olmo2ForTokenClassification."""
    config = AutoConfig.for_model(
        "olmo2",
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    causal = AutoModelForCausalLM.from_config(config)
    draw_weights(causal, 0)
    causal.save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForTokenClassification.from_pretrained(tmp_path / "causal")
    model = load_value_model(str(tmp_path / "causal"), dtype=torch.float32)
    assert is_derived(model)
    draw_weights(value_head(model), 1)
    model.save_pretrained(tmp_path / "critic")
    again = load_value_model(str(tmp_path / "critic"), dtype=torch.float32)
    weights = again.state_dict()
    assert value_head(model).weight.any()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(values_of(again, [5, 80, 7]), values_of(model, [5, 80, 7]))


# ------------------------------------------------------------------------------------------------------- refusals


def test_a_configuration_other_than_the_folders(tiny_llama: Path) -> None:
    model = load_value_model(str(tiny_llama), dtype=torch.float32, config_overrides={"rms_norm_eps": 0.5})
    plain = load_value_model(str(tiny_llama), dtype=torch.float32)
    assert model.config.rms_norm_eps == 0.5
    for each in (model, plain):
        draw_weights(each.score, 3)
    assert not torch.allclose(values_of(model, [1, 2, 3]), values_of(plain, [1, 2, 3]))
    with pytest.raises(ModelError, match="no field rms_norm_epsilon") as error:
        load_value_model(str(tiny_llama), dtype=torch.float32, config_overrides={"rms_norm_epsilon": 0.5})
    assert error.value.problems[0].field == "critic.config_overrides"


def test_a_head_of_two_labels_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = with_head(tiny_llama, tmp_path, labels=2)
    with pytest.raises(ModelError, match="does not have exactly one label; use one that was trained with num_labels=1"):
        load_value_model(str(folder), dtype=torch.float32)


def test_a_body_with_holes_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    AutoConfig.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    state = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"no weights of the right shape for model\.layers\.1\.mlp\.down_proj"):
        load_value_model(str(tmp_path), dtype=torch.float32)


def test_a_path_without_a_model_is_refused_under_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model could be loaded from") as caught:
        load_value_model(str(tmp_path), dtype=torch.float32)
    assert caught.value.problems[0].field == "critic.path"


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"vit at .* is not a causal language model that transformers knows"):
        load_value_model(str(tmp_path), dtype=torch.float32)
