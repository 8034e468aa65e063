"""Loading models and tokenizers, and what a user is told when that is not possible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPTJConfig

from posttrain.config.model import ModelConfig
from posttrain.errors import ModelError
from posttrain.models.loading import end_token_ids, expanded, load_causal_lm, load_tokenizer
from posttrain.models.tiny import write_tiny_model
from posttrain.plan.model_shape import read_shape

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture
def folder(tiny_qwen: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Qwen3 that a test may spoil."""
    return shutil.copytree(tiny_qwen, tmp_path / "model")


def problem_of(folder: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as raised:
        load_causal_lm(str(folder), dtype=torch.float32, **options)
    assert raised.value.exit_code == 2
    (problem,) = raised.value.problems
    assert problem.field == "model.path"
    return str(problem)


def tokenizer_problem_of(config: ModelConfig) -> str:
    with pytest.raises(ModelError) as raised:
        load_tokenizer(config)
    (problem,) = raised.value.problems
    assert problem.field.startswith("model.")
    return str(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_is_in_eval_mode_with_our_attention_and_in_the_dtype_asked_for(
    tiny_llama: Path, dtype: torch.dtype
) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=dtype)
    assert not any(module.training for module in model.modules())
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert model.config._attn_implementation == "posttrain"


def test_home_folder_is_expanded_and_hub_ids_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/model") == str(tmp_path / "model")
    assert expanded("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"


def test_end_tokens_are_those_of_all_three_places(tiny_qwen: Path) -> None:
    model = load_causal_lm(str(tiny_qwen), dtype=torch.float32)
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_qwen)))
    model.generation_config.eos_token_id = [7, 9]
    model.config.eos_token_id = 9
    assert end_token_ids(model, tokenizer) == {7, 9, tokenizer.eos_token_id}
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert end_token_ids(model, tokenizer) == {tokenizer.eos_token_id}


# ------------------------------------------------------------------------------------------------ broken folders


def test_folder_without_config(tmp_path: Path) -> None:
    assert f"no model could be loaded from {tmp_path}" in problem_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"), [('{"model_type": "qwen3", "num_hidden_layers": "two"}', "'two'"), ("[]", "model_type")]
)
def test_a_config_that_cannot_be_is_not_blamed_on_the_tokenizer(folder: Path, config: str, said: str) -> None:
    (folder / "config.json").write_text(config)
    found = tokenizer_problem_of(ModelConfig(path=str(folder)))
    assert "no model could be loaded" in found and said in found and "tokenizer" not in found


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no model could be loaded" in problem_of(folder)


def test_weights_cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "no model could be loaded" in problem_of(folder)


def test_pointers_of_git_lfs_in_the_place_of_weights(folder: Path) -> None:
    """What git clone leaves without git-lfs. Its first bytes, read as the length of a header, are 2e18."""
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert read_shape(str(folder)) is None
    found = problem_of(folder)
    assert "no model could be loaded" in found and "model.safetensors is a pointer of git-lfs" in found


def test_missing_weights_are_not_replaced_by_random_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "has no weights of the right shape for lm_head.weight; use the complete folder" in problem_of(folder)


def test_weights_of_another_shape_are_not_replaced_by_random_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "has no weights of the right shape for lm_head.weight" in problem_of(folder)


def test_many_missing_weights_are_counted(folder: Path) -> None:
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if "layers.1." not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = problem_of(folder)
    assert "model.layers.1.input_layernorm.weight, " in text and "and 8 more;" in text  # 11 tensors in a layer


def test_tied_output_embedding_is_not_missing(tiny_llama: Path) -> None:
    assert "lm_head.weight" not in load_file(tiny_llama / "model.safetensors")
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ------------------------------------------------------------------------------------- architectures we cannot run


def write_config(folder: Path, model_type: str, **changes: Any) -> Path:
    AutoConfig.for_model(model_type, **{**SMALL, **changes}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("deepseek_v32", {}, "attention to tokens that an indexer chooses"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("falcon_h1", {}, "attention layers that are neither full nor sliding-window"),
    ],
)
def test_attention_that_ours_does_not_compute_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    text = problem_of(write_config(tmp_path, model_type, **changes))
    assert reason in text and "is not supported" in text and "choose a" in text


def test_model_outside_the_attention_interface_is_refused(tmp_path: Path) -> None:
    """Its attention would ignore ours, and let every packed sequence see the others."""
    config = AutoConfig.for_model(
        "bloom", vocab_size=32, hidden_size=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert problem_of(tmp_path)


# ------------------------------------------------------------------------------------------------- rounded weights


def test_weights_stored_in_8_bits_are_restored(tmp_path: Path) -> None:
    """Blocks of 16 x 16 weights with a scale each, as Qwen3-FP8 and DeepSeek-V3 store them: every weight is its number times the
    block's scale, and the model that is saved says nothing of 8 bits."""
    write_tiny_model(tmp_path, "qwen3")
    weights, stored = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in weights.items():
        stored[name] = weight
        if name.endswith("_proj.weight"):
            blocks = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            stored[name] = (blocks / scales).flatten(0, 1).flatten(1).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
            rounded = stored[name].float().unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            weights[name] = (rounded * scales).flatten(0, 1).flatten(1)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]})
    model = load_causal_lm(str(tmp_path), dtype=torch.float32)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), weights[name], rtol=1e-3, atol=1e-6, msg=name)
    assert not hasattr(model.config, "quantization_config") or model.config.quantization_config is None


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "of tomorrow"])
def test_weights_stored_in_another_rounding_are_refused(tmp_path: Path, method: str) -> None:
    write_tiny_model(tmp_path)
    say(tmp_path, {"quant_method": method, "bits": 4})
    assert f"are stored rounded ({method}), and cannot be trained; name the folder of the whole" in problem_of(tmp_path)


def say(folder: Path, rounding: dict[str, Any]) -> None:
    """Write into a folder's config.json how its weights are rounded."""
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": rounding}))


# ------------------------------------------------------------------------------------------------------ tokenizers


def test_folder_without_tokenizer_files(folder: Path) -> None:
    """transformers makes a one-token Qwen tokenizer of such a folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    text = tokenizer_problem_of(ModelConfig(path=str(folder)))
    assert f"no tokenizer could be loaded from {folder}" in text and "model.tokenizer_path" in text


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', "[]"])
def test_tokenizer_file_that_is_not_one(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert "no tokenizer could be loaded" in tokenizer_problem_of(ModelConfig(path=str(folder)))


def test_tokenizer_of_another_folder(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path), tokenizer_path=str(tiny_llama)))
    assert len(tokenizer) == 259
    with pytest.raises(ModelError) as raised:
        load_tokenizer(ModelConfig(path=str(tiny_llama), tokenizer_path=str(tmp_path)))
    assert raised.value.problems[0].field == "model.tokenizer_path"


def test_chat_template_file_replaces_the_tokenizers(tiny_llama: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }} !", encoding="utf-8")
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_llama), chat_template_file=str(template)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi !"
    text = load_tokenizer(ModelConfig(path=str(tiny_llama), chat_template="{{ messages[0]['content'] }}?"))
    assert text.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi?"
    missing = ModelConfig(path=str(tiny_llama), chat_template_file=str(tmp_path / "none.jinja"))
    assert "chat template cannot be read" in tokenizer_problem_of(missing)


def test_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "no model could be loaded" in problem_of(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "no model could be loaded" in problem_of(folder)


def test_a_class_with_a_list_of_its_own_attentions_is_refused(tmp_path: Path) -> None:
    config = GPTJConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=64, rotary_dim=8, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the attention of gptj at .* is not transformers' interface; choose a Llama"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


def test_an_activation_that_is_none(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "x"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no model could be loaded from .*: .*x"):
        load_causal_lm(str(folder), dtype=torch.float32)
