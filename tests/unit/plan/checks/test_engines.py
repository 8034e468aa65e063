"""Engines, and ways of splitting that they have; what --here makes of a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.dialects.here import at_hand
from posttrain.plan.checks.train import check, warnings_of


def config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}, **sections})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"placement": {"devices": 2}}, "the policy has 2 devices, and policy.engine=local trains on one"),
        (
            {"placement": {"devices": 2}, "policy": {"engine": "fsdp", "tensor_parallel": 2}},
            "policy.tensor_parallel is 2, and policy.engine=fsdp does not split that way; use policy.tensor_parallel=1, or "
            "policy.engine=megatron",
        ),
        (
            {"policy": {"sequence_parallel": 2}},
            "policy.sequence_parallel is 2, and policy.engine=local does not split that way; use policy.sequence_parallel=1, or "
            "policy.engine=fsdp",
        ),
        (
            {
                "placement": {"devices": 2},
                "policy": {"engine": "fsdp"},
                "advantage": {"name": "gae"},
                "critic": {"pipeline_parallel": 2, "engine": "fsdp"},
            },
            "critic.pipeline_parallel is 2, and critic.engine=fsdp does not split that way",
        ),
        (
            {"reward": {"model": {"path": "r", "engine": "megatron"}}},
            "reward.model.engine=megatron does not compute reward models; use ",
        ),
    ],
)
def test_what_an_engine_cannot_do(sections: dict[str, Any], said: str) -> None:
    assert any(said in str(problem) for problem in check(config(**sections)))


def test_a_critic_that_the_run_does_without_is_not_looked_at() -> None:
    run = config(placement={"devices": 2}, policy={"engine": "fsdp"}, critic={"pipeline_parallel": 2})
    assert not [problem for problem in check(run) if "critic" in problem.what]


def test_an_adapter_of_a_critic_that_the_run_does_without_is_reported() -> None:
    assert any(
        text.startswith("critic.lora has no effect: grpo") for text in warnings_of(config(critic={"lora": {"rank": 4}}))
    )


def test_options_without_effect_are_told() -> None:
    told = warnings_of(config(policy={"engine_options": {"fsdp_size": 2}}))
    assert "policy.engine_options has no effect: the local engine reads none (fsdp_size)" in told
    run = config(
        placement={"devices": 2},
        policy={"engine": "fsdp", "engine_options": {"use_orig_params": True}},
        loss={"kl_coef": 0.1},
        reference={"engine_options": {"forward_prefetch": True, "async_save_ckpt": True}},
    )
    told = warnings_of(run)
    assert any(text.startswith("policy.engine_options.use_orig_params has no effect: FSDP2") for text in told)
    assert any(text.startswith("reference.engine_options.async_save_ckpt has no effect") for text in told)


def test_a_cluster_on_the_device_at_hand() -> None:
    run = config(
        placement={"devices": 16, "nodes": 2, "runtime": "ray"},
        policy={"engine": "fsdp", "sequence_parallel": 2, "devices": [0, 1], "engine_options": {"fsdp_size": 1}},
        reward={"terms": [], "model": {"path": "r", "devices": [3]}},
    )
    here, changes = at_hand(run)
    assert (here.placement.devices, here.placement.nodes, here.placement.runtime) == (1, 1, "auto")
    assert here.policy.engine == "local" and here.policy.devices is None and here.policy.sequence_parallel == 1
    assert here.reward.model is not None and here.reward.model.devices is None
    assert "reward.model.devices: all instead of [3]" in changes and "placement.nodes: 1 instead of 2" in changes


def test_liger_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(model={"path": "x", "liger": True})
    for installed in (False, True):
        monkeypatch.setattr("posttrain.dialects.here.is_installed", lambda library, there=installed: there)
        here, changes = at_hand(run)
        assert here.model.liger is installed and bool(changes) is not installed


def test_references_that_cannot_follow_the_policy() -> None:
    def said(**sections: Any) -> list[str]:
        moving = {"reference": {"update_every": 2}, "loss": {"kl_coef": 0.1}}
        return [problem.what for problem in check(config(**(moving | sections)))]

    two = {"placement": {"devices": 2}}
    assert said() == said(**two, policy={"engine": "fsdp"}) == said(**two, policy={"engine": "deepspeed"}) == []
    assert said(policy={"lora": {}}) == [
        "reference.update_every: the policy is an adapter, and the reference the model below it, which stays as it is"
    ]
    assert said(**two, policy={"engine": "megatron"}) == [
        "reference.update_every: policy.engine=megatron cannot mix its weights into the reference"
    ]
    apart = {"reference": {"update_every": "epoch", "devices": [1]}}
    assert said(**two, policy={"devices": [0]}, **apart) == [
        "reference.update_every mixes the policy's weights into the reference, which is on other devices"
    ]
    assert warnings_of(config(reference={"update_every": 2})) == [
        "reference.update_every has no effect: loss.kl_coef and reward.kl.coef are 0, so no reference model is loaded"
    ]
    assert warnings_of(config(reference={"update_mix": 0.5})) == [
        "reference.update_mix has no effect: reference.update_every is null"
    ]
