"""Options of the engine fsdp, in the words of FSDP1, FSDP2 and the dialects."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.dialects.native.ledger import native_ledger
from posttrain.plan.engines.fsdp import FsdpSettings, fsdp_settings


def read(ranks: int = 8, role: str = "policy", **options: Any) -> FsdpSettings:
    settings, problems, _ = fsdp_settings(options, ranks, role=role)
    assert not problems
    return settings


def told(role: str = "policy", **options: Any) -> str:
    _, problems, told = fsdp_settings(options, 8, role=role)
    return "\n".join([*map(str, problems), *told])


@pytest.mark.parametrize(("size", "shard"), [(None, 8), (-1, 8), (0, 8), (8, 8), (64, 8), (2, 2), (1, 1)])
def test_groups_that_keep_a_copy(size: int | None, shard: int) -> None:
    settings = read(fsdp_size=size)
    assert (settings.shard, settings.replicas) == (shard, 8 // shard)


@pytest.mark.parametrize(
    ("asked", "found"), [(None, True), (True, True), (False, False), (2, 2), (8, True), (1, False)]
)
def test_what_stays_gathered_after_the_forward_pass(asked: Any, found: Any) -> None:
    assert read(reshard_after_forward=asked).reshard_after_forward is found


def test_verls_skyrls_and_rolls_words() -> None:
    verl = read(
        offload_policy=True,
        forward_prefetch=True,
        wrap_policy={"min_num_params": 100, "transformer_layer_cls_to_wrap": "Block"},
        mixed_precision={"reduce_dtype": "bf16"},
    )
    assert verl.cpu_offload and verl.forward_prefetch and (verl.smallest_unit, verl.layers) == (100, ("Block",))
    assert verl.reduce_dtype == "bfloat16"
    skyrl = read(cpu_offload=True, wrap_policy={"disable": True})
    assert skyrl.cpu_offload and skyrl.one_unit
    roll = read(param_dtype="bf16", reduce_dtype="float32", wrap_policy={"transformer_layer_cls_to_wrap": ["A", "B"]})
    assert (roll.param_dtype, roll.reduce_dtype, roll.layers) == ("bfloat16", "float32", ("A", "B"))


def test_what_is_frozen_rests_on_the_cpu_either_way() -> None:
    assert read(role="reference", param_offload=True).cpu_offload and told("reference", param_offload=True) == ""
    policy = read(param_offload=True)
    assert (policy.param_offload, policy.cpu_offload) == (True, False) and told(param_offload=True) == ""


def test_weights_that_are_always_on_the_cpu_do_not_leave_the_device() -> None:
    both = {"param_offload": True, "offload_policy": True}
    assert read(**both).cpu_offload and not read(**both).param_offload
    assert "param_offload has no effect: offload_policy keeps the weights on the CPU always" in told(**both)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload_params": True}, "policy.engine_options.offload_params has no effect: cpu_offload takes parameters"),
        ({"fsdp_sise": 2}, "fsdp has no option fsdp_sise; did you mean fsdp_size?"),
        ({"fsdp_size": 3}, "8 devices do not split into groups of 3"),
        ({"fsdp_size": True}, "fsdp: fsdp_size must be a number, not true; use -1 for all"),
        ({"reshard_after_forward": 3}, "is neither true nor false nor a divisor of the 8 devices"),
        ({"ep_size": 2}, "ep_size=2: fsdp does not split experts"),
        ({"reduce_dtype": "fp16"}, "torch.float32, not 'fp16'; use bf16 or fp32"),
        ({"wrap_policy": "all"}, "wrap_policy must be a section of key: value lines, not 'all'"),
        ({"wrap_policy": {"wrap_embeddings": True}}, "wrap_policy.wrap_embeddings has no effect"),
        ({"use_orig_params": True}, "use_orig_params has no effect: FSDP2 always keeps"),
        ({"mixed_precision": {"buffer_dtype": "fp32"}}, "buffer_dtype has no effect"),
    ],
)
def test_what_is_wrong_and_what_has_no_effect(options: dict[str, Any], said: str) -> None:
    assert said in told(**options)


def test_options_have_a_row_in_the_native_ledger() -> None:
    row = native_ledger().find("policy.engine_options.param_offload")
    assert row is not None
    assert row.meaning.startswith("fsdp: Keep weights in CPU memory") and "megatron: Ignored" in row.meaning
