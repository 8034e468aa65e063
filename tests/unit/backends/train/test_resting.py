"""Weights that leave their device while others work there: memory given back, the same tensors, the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.backends.torch_training.resting import Resting, Turns
from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import packed_layout


def held(tensor: Tensor) -> int:
    """Bytes of memory behind it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes()


def test_memory_is_given_back_and_filled_again() -> None:
    layer = nn.Linear(3, 2)
    tied = nn.Linear(3, 2, bias=False)
    tied.weight = layer.weight
    weight, before = layer.weight, layer.weight.detach().clone()
    resting = Resting(lambda: [*layer.parameters(), *tied.parameters()])
    for _ in range(2):
        resting.leave()
        resting.leave()  # already away
        assert resting.away and held(weight) == 0 and held(layer.bias) == 0
        resting.come_back()
        resting.come_back()
        assert not resting.away and layer.weight is weight and held(weight) == 6 * 4
        assert torch.equal(weight, before)
    with torch.no_grad():
        weight.add_(1.0)  # what is learned meanwhile is what leaves next time
    resting.leave()
    resting.come_back()
    assert torch.equal(weight, before + 1.0)


def test_one_is_there_at_a_time() -> None:
    models = {role: nn.Linear(2, 2) for role in ("policy", "critic", "rollout")}
    turns = Turns({role: Resting(model.parameters) for role, model in models.items()}, {"reference": "policy"})

    def here() -> set[str]:
        return {role for role, model in models.items() if held(model.weight)}

    for turn, there in (
        (("policy",), {"policy"}),
        (("policy", "rollout"), {"policy", "rollout"}),  # weights go from one to the other
        (("rollout",), {"rollout"}),
        (("reference",), {"policy"}),  # the policy without its adapter
        (("critic",), {"critic"}),
        (("reward model",), set()),  # stays on the device, and has it to itself
    ):
        turns.take(*turn)
        assert here() == there
    turns.take("policy", "critic", "rollout")
    assert here() == set(models)


@pytest.fixture
def one_process(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)


def test_parts_of_a_model_that_is_shared_out(one_process: None, tiny_llama: Path) -> None:
    """Away, a model cannot be computed; back, it computes and learns what it did."""
    try:
        model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
        sharding = FsdpSharding("cpu", param_dtype=torch.float32)
        sharding.wrap(model)
        ids = torch.arange(4)[None]
        before = {name: sharding.whole(weight).clone() for name, weight in model.named_parameters()}
        logits = model(ids, attention_layout=packed_layout([4])).logits
        logits.sum().backward()
        gradient = {
            name: sharding.whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None
        }
        model.zero_grad()
        model.eval()
        resting = Resting(model.parameters)
        resting.leave()
        assert sum(held(weight) for weight in model.parameters()) == 0
        resting.come_back()
        for name, weight in model.named_parameters():
            assert torch.equal(sharding.whole(weight), before[name])
        again = model(ids, attention_layout=packed_layout([4])).logits
        assert torch.equal(again, logits)
        again.sum().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None and torch.equal(sharding.whole(weight.grad), gradient[name])
    finally:
        dist.destroy_process_group()
