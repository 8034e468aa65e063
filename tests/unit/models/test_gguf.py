"""Models as GGUF files: read back by gguf's reader, by transformers' own, and refused where llama.cpp would compute otherwise."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import ModelError
from posttrain.models.gguf_file import check_family, rope_factors, write_gguf
from posttrain.models.gguf_layout import Layout, read_weights
from posttrain.models.gguf_tokenizer import SPLITS, pre_tokenizer_name
from posttrain.models.tiny import write_tiny_model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_file_holds_the_model(tmp_path: Path, family: Any) -> None:
    folder = write_tiny_model(tmp_path / "tiny", family)
    written = write_gguf(folder, tmp_path / "tiny.gguf", "f32")
    assert written.largest_error == 0.0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    read = read_weights(written.path, Layout(model.config), list(state))
    tied = {"lm_head.weight"} if family == "llama" else set()
    assert read.keys() == state.keys() - tied and written.tensors == len(read)
    assert all(torch.equal(read[name], state[name]) for name in read)
    fields = gguf.GGUFReader(written.path).fields
    assert fields["general.architecture"].contents() == family
    assert fields[f"{family}.attention.head_count_kv"].contents() == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert fields["tokenizer.ggml.tokens"].contents() == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """Its reader turns the rows of queries and keys back by code of its own."""
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    write_gguf(folder, folder / "tiny.gguf", "f32")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = load_gguf_checkpoint(folder / "tiny.gguf", return_tensors=True, model_to_load=model)["tensors"]
    state = model.state_dict()
    assert {"model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"} <= found.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), state[name]) for name in found)


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_rounded_weights_are_near_and_vectors_are_kept(tmp_path: Path, kind: str) -> None:
    # Of the tensor's largest weight: half a step of 2^-11 and 2^-8; of a block's, 1/127, 1/31 and 1/15 of the range
    bounds = {
        "f16": 2**-11,
        "bf16": 2**-8,
        "q8_0": 1 / 127,
        "q5_1": 2 / 31,
        "q5_0": 1 / 15,
        "q4_1": 2 / 15,
        "q4_0": 1 / 7,
    }
    bound = bounds[kind]
    written = write_gguf(write_tiny_model(tmp_path / "tiny"), tmp_path / "tiny.gguf", kind)
    assert 0 < written.largest_error <= bound
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(written.path).tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32" and kinds["blk.0.attn_q.weight"] == kind.upper()
    assert written.kinds == Counter(kinds.values())


def test_factors_of_llama_3_by_hand_and_as_transformers_has_them() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope |= {"original_max_position_embeddings": 64}
    factors = rope_factors(rope, 4)
    # Frequencies 1 and 1/100: waves of 6.28 tokens (64 / 6.28 = 10.2 > 4: kept) and 628 (0.10 < 1: divided by 8)
    assert factors.tolist() == [1.0, 8.0]
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=2, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    ours = 10000.0 ** -(torch.arange(0, 32, 2) / 32) / rope_factors(rope, 32)
    assert torch.allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "models of type gpt_oss are not written as GGUF here"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embeddings of type yarn"),
        ({"model_type": "mistral", "sliding_window": 4096}, "attends to the last 4096 tokens only"),
    ],
)
def test_a_model_that_would_compute_otherwise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_family(SimpleNamespace(**({"model_type": "llama"} | changes)))


def test_names_of_pre_tokenizers() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer_name(byte_level) == "gpt-2"
    assert pre_tokenizer_name({"type": "Sequence", "pretokenizers": [digits, byte_level]}) == "smollm"
    for pattern, name in SPLITS.items():
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        parts = [split, byte_level | {"use_regex": False}]
        assert pre_tokenizer_name({"type": "Sequence", "pretokenizers": parts}) == name
    with pytest.raises(ModelError, match="no name for"):
        pre_tokenizer_name({"type": "Metaspace"})


def test_a_file_beside_its_model_is_read_alone(tmp_path: Path, tiny_llama: Path) -> None:
    """As `posttrain export --gguf` writes it: with the tokenizer of the folder beside it, transformers dropped the template."""
    from posttrain.models.chat import load_gguf

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    state = json.loads((folder / "tokenizer.json").read_text())  # with a merge, as real ones have
    state["model"]["vocab"] = {token: number for token, number in state["model"]["vocab"].items() if number} | {"he": 0}
    state["model"]["merges"], state["pre_tokenizer"]["use_regex"] = [["h", "e"]], True
    (folder / "tokenizer.json").write_text(json.dumps(state))
    write_gguf(folder, folder / "model-f32.gguf", "f32")
    _, tokenizer = load_gguf(folder / "model-f32.gguf")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny_llama).chat_template is not None
