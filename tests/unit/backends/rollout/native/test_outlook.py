"""What the native sampler would do with a model is known from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from posttrain.backends.rollout.native.kernels import load_kernels
from posttrain.backends.rollout.native.outlook import sampling_outlook
from posttrain.cli.app import app

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 5000,
}

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
}
EXPERTS = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


OPT = {"num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 64}


def write(folder: Path, family: str, **more: Any) -> str:
    AutoConfig.for_model(family, **SIZES | {"num_hidden_layers": 12} | more).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "more", "outlook"),
    [
        ("llama", {}, "fast passes with compiled kernels"),
        ("gemma3_text", {"head_dim": 16}, "fast passes with compiled kernels"),  # every sixth layer sees everything
        ("smollm3", {}, "fast passes with compiled kernels"),  # every fourth without positions
        ("qwen3_5_text", LINEAR | {"head_dim": 32}, "fast passes with compiled kernels"),
        ("qwen3_next", LINEAR | EXPERTS, "fast passes with compiled kernels"),
        ("olmo_hybrid", LINEAR, "fast passes with compiled kernels"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 6}, "fast passes with compiled kernels"),
        ("cohere", {}, "fast passes with compiled kernels"),
        ("gpt_neox", {"num_key_value_heads": 4}, "fast passes with compiled kernels"),
        (
            "gpt_oss",
            {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            "fast passes with compiled kernels",
        ),
        ("opt", OPT, "own modules, which is slower: OPTDecoder does not consist of"),
        ("qwen3", {"head_dim": 8}, "heads of 8 numbers are narrower"),
    ],
)
def test_outlook(tmp_path: Path, family: str, more: dict[str, Any], outlook: str) -> None:
    import torch

    if isinstance(reason := load_kernels(torch.float32), str):
        pytest.skip(reason)
    found = sampling_outlook(write(tmp_path, family, **more))
    assert outlook in found
    by_modules = "own modules" in outlook
    assert found.endswith(
        "rollout.weights=int8 needs fast passes" if by_modules else "rollout.weights=int8 is compiled"
    )


def test_doctor_prints_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", write(tmp_path, "opt", **OPT)])
    assert result.exit_code == 0, result.output
    assert f"sampling of {tmp_path} by rollout.engine=native on a CPU: sampling goes through" in result.output.replace(
        "\n", " "
    )
    assert "OPTDecoder does not consist of" in result.output
