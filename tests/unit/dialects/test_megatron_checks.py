"""What is told about a policy of megatron before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.dialects.checks import check, unbuilt, warnings_of

TWO = {"engine": "megatron", "tensor_parallel": 2}


def config(policy: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    given = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "placement": {"devices": 2}, **sections}
    return RunConfig.model_validate({**given, "policy": policy})


def test_two_devices_are_built() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("ray")
    for sizes in (TWO, {"engine": "megatron", "pipeline_parallel": 2}, {"engine": "megatron", "sequence_parallel": 2}):
        assert check(config(sizes)) == unbuilt(config(sizes)) == warnings_of(config(sizes)) == []


@pytest.mark.parametrize(
    ("policy", "sections", "said"),
    [
        (TWO | {"lora": {}}, {}, "megatron trains all weights, and policy.lora asks for an adapter"),
        (TWO | {"engine_options": {"tensor_paralel": 2}}, {}, "megatron has no option tensor_paralel"),
        (TWO, {"loss": {"kl_coef": 0.1, "kl_estimator": "full"}}, "which megatron's ranks have parts of"),
    ],
)
def test_what_is_wrong(policy: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    assert said in " | ".join(str(problem) for problem in check(config(policy, **sections)))


@pytest.mark.parametrize(
    ("policy", "sections", "said"),
    [
        (TWO | {"engine_options": {"expert_model_parallel_size": 1}}, {}, ""),
        (TWO | {"engine_options": {"virtual_pipeline_model_parallel_size": 2}}, {}, "virtual stages are planned"),
        (
            TWO,
            {"advantage": {"name": "gae"}, "critic": {"engine": "megatron"}},
            "a critic trained by megatron is planned",
        ),
    ],
)
def test_what_is_planned(policy: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("ray")
    assert [said in problem.what for problem in unbuilt(config(policy, **sections))] == [True] * bool(said)


def test_what_has_no_effect() -> None:
    model = {"path": "x", "liger": True, "activation_offload": True}
    reference = {"offload": True, "engine_options": {"param_offload": True}}
    policy = TWO | {"engine_options": {"use_distributed_optimizer": True}}
    told = warnings_of(config(policy, model=model, reference=reference, loss={"kl_coef": 0.1}))
    for name in (
        "policy.engine_options.use_distributed_optimizer",
        "model.liger",
        "model.activation_offload",
        "reference.offload",
        "reference.engine_options.param_offload",
    ):
        assert len([each for each in told if each.startswith(f"{name} has no effect")]) == 1, name
