"""What a run with workers can be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.checks.train import check, unsupported, warnings_of


def config(**sections: dict[str, Any]) -> RunConfig:
    defaults: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["x"], "prompts_per_step": 4},
        "reward": {"terms": [{"name": "gsm8k"}]},
    }
    return RunConfig.model_validate(defaults | sections)


FSDP = {"engine": "fsdp"}
APART: dict[str, dict[str, Any]] = {
    "policy": {"devices": [0]},
    "reference": {"devices": [0]},
    "placement": {"devices": 2},
}


def test_two_devices_with_fsdp_are_built() -> None:
    pytest.importorskip("ray")
    two = config(policy=FSDP, placement={"devices": 2})
    assert unsupported(two) == [] and check(two) == []


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.plan.checks.engines.is_installed", lambda library: library != "deepspeed")
    two = config(
        policy={"engine": "deepspeed"},
        critic={"engine": "deepspeed"},
        advantage={"name": "gae"},
        placement={"devices": 2},
    )
    assert [(each.what, each.fix, each.field) for each in unsupported(two)] == [
        (
            f"deepspeed is not installed (needed by {role}.engine=deepspeed)",
            "pip install 'posttrain[deepspeed]'",
            f"{role}.engine",
        )
        for role in ("policy", "critic")
    ]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"policy": FSDP},
            "fsdp shares the policy out over worker processes, and placement.runtime=inprocess has none",
        ),
        ({"policy": {"engine": "megatron"}}, "megatron shares the policy out over worker processes"),
        ({"policy": {"engine": "deepspeed"}}, "deepspeed shares the policy out over worker processes"),
        (
            {
                "policy": FSDP,
                "placement": {"devices": 6, "nodes": 2},
                "rollout": {
                    "devices": [0, 3, 4],
                    "engine": "vllm",
                    "tensor_parallel": 3,
                    "engine_options": {"python": "/p"},
                },
            },
            "a copy of the sampler has 1 and 2 devices on its nodes, and each must have as many",
        ),
        ({"placement": {"runtime": "ray", "ray_address": "ray://h:10001"}}, "ray:// drives a cluster from outside"),
        (
            {"policy": FSDP, "placement": {"devices": 2}, "rollout": {"tensor_parallel": 2}},
            "native has a copy of the weights on each device",
        ),
    ],
)
def test_what_is_told_before_a_run(sections: dict[str, Any], said: str) -> None:
    assert said in " | ".join(problem.what for problem in unsupported(config(**sections)))


@pytest.mark.parametrize(
    "rollout",
    [
        {"engine": "vllm", "engine_options": {"python": "/p"}, "tensor_parallel": 2, "weight_sync": "shared_memory"},
        {"engine": "vllm", "engine_options": {"python": "/p"}, "weight_sync": "collective"},
        {"engine": "vllm", "endpoints": ["http://localhost:1", "http://localhost:2"]},
    ],
)
def test_servers_go_with_workers(rollout: dict[str, Any]) -> None:
    there = config(policy=FSDP, placement={"devices": 2}, rollout=rollout)
    assert [*check(there), *unsupported(there)] == []


def test_a_copy_on_two_nodes_takes_weights_in_a_way_that_reaches_both() -> None:
    """On 2 x 2 devices: vLLM by a broadcast, SGLang through a folder."""

    def there(**rollout: Any) -> RunConfig:
        served = {"engine": "vllm", "tensor_parallel": 4, "engine_options": {"python": "/p"}}
        return config(policy=FSDP, placement={"devices": 4, "nodes": 2}, rollout=served | rollout)

    for engine, way in (("vllm", "collective"), ("sglang", "disk")):
        assert [*check(there(engine=engine)), *unsupported(there(engine=engine))] == []
        assert [text for text in warnings_of(there(engine=engine)) if f"and weights by {way}" in text]
        (problem,) = check(there(engine=engine, weight_sync="shared_memory"))
        assert "on more than one node (2 on each), and shared_memory reaches one of them" in problem.what
        assert problem.fix == f"use rollout.weight_sync={way}"
    split = {"tensor_parallel": 2, "engine_options": {"python": "/p", "pipeline_parallel_size": 2}}
    assert unsupported(there(**split)) == [] and any("lies on 2 nodes" in text for text in warnings_of(there(**split)))
    assert not [text for text in warnings_of(there(tensor_parallel=2)) if "nodes" in text]


@pytest.mark.parametrize("server", [{"engine_options": {"python": "/p"}}, {"endpoints": ["http://localhost:1"]}])
def test_an_adapter_alone_goes_with_workers(server: dict[str, Any]) -> None:
    rollout = {"engine": "vllm", "weight_sync": "adapter"} | server
    there = config(policy=FSDP | {"lora": {"rank": 4}}, placement={"devices": 2}, rollout=rollout)
    assert [*check(there), *unsupported(there)] == []


@pytest.mark.parametrize("sync", ["shared_memory", "collective", "auto"])
def test_ways_to_a_sampler_on_other_devices(sync: str) -> None:
    there = config(**APART, rollout={"devices": [1], "weight_sync": sync})
    assert [problem for problem in check(there) if problem.field == "rollout.weight_sync"] == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({**APART, "rollout": {"devices": [1], "weight_sync": "disk"}}, "and disk does not lead there"),
        ({"rollout": {"weight_sync": "shared_memory"}}, "there is nothing to send by shared_memory"),
        (
            {"rollout": {"engine": "sglang", "endpoints": ["http://localhost:1"], "weight_sync": "shared_memory"}},
            "which shared_memory cannot reach",
        ),
        (
            {
                "policy": {"devices": [0]},
                "reference": {"devices": [1]},
                "loss": {"kl_coef": 0.1, "kl_estimator": "full"},
                "placement": {"devices": 2},
            },
            "the reference is on other devices than the policy",
        ),
    ],
)
def test_what_contradicts_itself(sections: dict[str, Any], said: str) -> None:
    assert said in " | ".join(problem.what for problem in check(config(**sections)))


def test_settings_of_workers_have_no_effect_in_one_process() -> None:
    alone = config(placement={"ray_address": "auto", "call_timeout_s": 5.0})
    told = [text for text in warnings_of(alone) if text.startswith("placement.")]
    why = "has no effect: the run has one process (placement.runtime)"
    assert told == [f"placement.ray_address {why}", f"placement.call_timeout_s {why}"]
    assert not [
        text for text in warnings_of(config(placement={"runtime": "ray", "ray_address": "auto"})) if "ray_" in text
    ]
