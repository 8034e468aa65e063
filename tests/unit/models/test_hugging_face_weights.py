"""What samplers that load checkpoints are sent, from a model that is whole, adapted, or there in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.config.lora import LoraConfig
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter
from posttrain.models.tiny import write_tiny_model


@pytest.mark.parametrize("adapted", [False, True])
def test_of_a_model_that_is_shared_out(adapted: bool, tiny_llama: Path, tmp_path: Path) -> None:
    """The names of the file it came from (its tied output once), whole tensors; an adapter merged."""
    whole, parts = (load_causal_lm(str(tiny_llama), dtype=torch.float32) for _ in range(2))
    if adapted:
        for model in (whole, parts):
            add_adapter(model, LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj", "embed_tokens"]), seed=1)
            torch.manual_seed(2)
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.data.normal_()
    expected = dict(hugging_face_weights(whole))
    stored = load_file(tiny_llama / "model.safetensors")
    assert expected.keys() == stored.keys()
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, stored[name])}
    assert changed == {name for name in expected if adapted and ("q_proj.weight" in name or "embed_tokens" in name)}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        sharding = FsdpSharding("cpu", param_dtype=torch.float32)
        sharding.wrap(parts)
        found = dict(hugging_face_weights(parts, sharding.whole))
        rounded = dict(hugging_face_weights(parts, sharding.whole, dtype=torch.bfloat16))
        # A process that keeps nothing takes part in gathering all the same tensors.
        gathered: list[Tensor] = []
        assert list(hugging_face_weights(parts, lambda t: gathered.append(t) or t, keep=False)) == []  # type: ignore[func-returns-value]
    finally:
        dist.destroy_process_group()
    assert found.keys() == expected.keys() and len(gathered) >= len(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
        assert torch.equal(rounded[name], found[name].bfloat16())


def test_of_a_shell_whose_weights_are_elsewhere(tmp_path: Path) -> None:
    """By the names of the file, in which experts stand one by one."""
    model = load_causal_lm(str(write_tiny_model(tmp_path, "qwen3_moe")), dtype=torch.float32)
    elsewhere = [(name, weight.detach().clone()) for name, weight in model.named_parameters()]
    model.to("meta")  # type: ignore[arg-type]
    found = dict(hugging_face_weights(model, gathered=elsewhere))
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in stored
    assert found.keys() == stored.keys() and all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    assert list(hugging_face_weights(model, keep=False, gathered=elsewhere)) == []
