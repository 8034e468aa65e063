"""A reference whose weights are mixed with the policy's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.backends.torch_training.moving_reference import MovingReference
from posttrain.errors import ModelError
from posttrain.models.loading import load_causal_lm

NAME = "model.norm.weight"


def policy_weights(value: float, like: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {NAME: torch.full_like(dict(like.named_parameters())[NAME], value, dtype=torch.float32)}


def test_the_mix_is_exact_and_small_moves_add_up(tiny_llama: Path, tmp_path: Path) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=torch.bfloat16)
    weight = dict(model.named_parameters())[NAME]
    weight.data.fill_(1.0)
    moving = MovingReference(model)
    towards = policy_weights(2.0, model)
    moving.move(towards.items(), 0.001)  # 1 + 0.001 is 1 in bfloat16, whose next number is 1.0078125
    assert weight.unique().tolist() == [1.0]
    for _ in range(9):
        moving.move(towards.items(), 0.001)
    # 2 - 0.999^10 = 1.009955, which is nearest to 1.0078125 in bfloat16
    assert weight.unique().tolist() == [1.0078125]
    moving.writer(sharded=False)(tmp_path)

    again = load_causal_lm(str(tiny_llama), dtype=torch.bfloat16)
    resumed = MovingReference(again)
    resumed.load(tmp_path)
    for each in (moving, resumed):
        each.move(towards.items(), 0.5)
    assert torch.equal(resumed._exact[NAME], moving._exact[NAME])
    assert resumed._exact[NAME][0].item() == pytest.approx(2 - 0.999**10 / 2)
    moving.move(policy_weights(7.0, model).items(), 1.0)
    assert weight.unique().tolist() == [7.0]


def test_chunks_hold_the_same_and_nothing_is_written_before_the_first_move(tiny_llama: Path, tmp_path: Path) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    moving = MovingReference(model)
    for sharded in (False, True):
        moving.writer(sharded=sharded)(tmp_path)
    assert list(tmp_path.iterdir()) == []
    moving.load(tmp_path)  # as it began
    moving.move(policy_weights(3.0, model).items(), 0.5)
    moving.writer(sharded=True)(tmp_path)
    other = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    MovingReference(other).load(tmp_path)
    assert torch.equal(dict(other.named_parameters())[NAME], dict(model.named_parameters())[NAME])
    assert moving.saved_bytes() == 4 * sum(weight.numel() for weight in model.parameters())


def test_a_reference_of_another_shape_is_refused(tiny_llama: Path) -> None:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    moving = MovingReference(model)
    moving.check_fits(dict(model.named_parameters()), lambda tensor: tensor.shape)
    for wrong in ({"model.other": torch.zeros(3)}, {NAME: torch.zeros(3)}):
        with pytest.raises(ModelError, match="has no model"):
            moving.check_fits(wrong, lambda tensor: tensor.shape)
