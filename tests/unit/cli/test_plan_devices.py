"""What a plan says about devices."""

from __future__ import annotations

from typing import Any

from posttrain.cli.plan_devices import devices_text, memory_text, traffic_text
from posttrain.config import RunConfig
from posttrain.plan.memory import RoleMemory
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.traffic import Traffic

GIB = 1024**3


def planned(**sections: dict[str, Any]) -> PlacementPlan:
    plan, problems = place(
        RunConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}, **sections})
    )
    assert plan is not None, problems
    return plan


def test_one_device() -> None:
    assert devices_text(planned()).splitlines() == [
        "Devices: 1 device, auto",
        "  rollout      0         the policy's own weights; awake in rollout",
        "  policy       0         1 copy; awake in log-probs, update",
    ]


def test_a_cluster() -> None:
    plan = planned(
        placement={"devices": 10, "nodes": 2},
        policy={
            "engine": "fsdp",
            "devices": [0, 1, 2, 3, 5, 6, 7, 8],
            "sequence_parallel": 2,
            "engine_options": {"fsdp_size": 4},
            "optimizer": {"offload": True},
        },
        rollout={"engine": "vllm", "devices": [0, 1, 2, 3], "tensor_parallel": 4},
    )
    assert devices_text(plan).splitlines() == [
        "Devices: 10 devices on 2 nodes, auto, by ray",
        "  rollout      0-3       1 copy, 4 devices each; awake in rollout",
        "                         4 share matrices",
        "                         stays in memory while policy works",
        "  policy       0-3,5-8   4 copies, 2 devices each; awake in log-probs, update",
        "                         2 share a sequence; weights in parts over 4, 2 times",
        "                         makes room (optimizer) while rollout works",
        "  (no role)    4,9",
    ]
    memory = [
        RoleMemory(role="rollout", weights=GIB, cache=2 * GIB),
        RoleMemory(role="policy", weights=GIB, optimizer=3 * GIB, gathered=GIB // 2, activations=GIB, host=0),
    ]
    # While the policy is updated: 1 + 3 + 0.5 + 1 of its own, and the sampler, which stays, 1 + 2.
    assert memory_text(memory, plan, "x").splitlines()[-1] == "  at most 8.50 on device 0, in update"


def test_servers_outside() -> None:
    text = devices_text(planned(rollout={"engine": "http", "endpoints": ["http://a:1", "http://b:1"]}))
    assert "  rollout      none      2 servers outside of the run; awake in rollout" in text


def test_what_is_sent() -> None:
    text = traffic_text([
        Traffic(what="policy: gather weights", bytes=3 * GIB // 2, messages=1200), Traffic(what="driver", bytes=2000, messages=2)
    ])  # fmt: skip
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["policy:", "gather", "weights", "1.5", "GiB", "1,200", "x"],
        ["driver", "2.0", "KiB", "2", "x"],
    ]
