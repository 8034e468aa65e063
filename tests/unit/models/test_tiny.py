"""The tiny models that other tests stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.models.tiny import FAMILIES, tiny_tokenizer, write_tiny_model

TOKENIZER = tiny_tokenizer()
USER_TURN = [{"role": "user", "content": "3+4"}]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_model_loads_with_auto_classes_and_generates(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path / "not" / "yet" / "there", family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 259  # 256 bytes and three special tokens
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    prompt = tokenizer.apply_chat_template(USER_TURN, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    sequence = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert prompt["input_ids"].shape[1] < sequence.shape[1] <= prompt["input_ids"].shape[1] + 5


@pytest.mark.parametrize("family", FAMILIES)
def test_two_builds_from_one_seed_are_equal_byte_for_byte(tmp_path: Path, family: str) -> None:
    torch.manual_seed(1)
    first = contents(write_tiny_model(tmp_path / "a", family, seed=5))
    torch.manual_seed(2)
    assert contents(write_tiny_model(tmp_path / "b", family, seed=5)) == first
    assert contents(write_tiny_model(tmp_path / "c", family, seed=6))["model.safetensors"] != first["model.safetensors"]


def test_building_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_tiny_model(tmp_path, "llama")
    assert torch.equal(torch.get_rng_state(), before)


def test_llama_shares_its_embeddings_and_qwen_does_not(tiny_llama: Path, tiny_qwen: Path) -> None:
    llama, qwen = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_llama, tiny_qwen))
    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    assert qwen.lm_head.weight is not qwen.model.embed_tokens.weight


def test_every_parameter_matters_to_the_last_position(tiny_qwen: Path) -> None:
    """No weight is dead: a mistake in the gradient of any of them can be seen."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    ids = torch.arange(30, 60).unsqueeze(0)
    model(input_ids=ids).logits[0, -1].log_softmax(-1)[7].backward()
    dead = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert dead == []


def test_token_ids_are_the_bytes_and_the_chat_template_is_chatml(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert tokenizer("aé\n")["input_ids"] == [97, 0xC3, 0xA9, 10]  # UTF-8; nothing is added around the text
    assert tokenizer.apply_chat_template(USER_TURN, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n"
    )
    turn_end = tokenizer.eos_token_id
    assert tokenizer("a<|im_end|>b")["input_ids"] == [97, turn_end, 98]
    assert tokenizer.decode([97, turn_end, 98], skip_special_tokens=True) == "ab"


@given(st.text(max_size=40))
def test_any_text_comes_back_from_its_token_ids(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
