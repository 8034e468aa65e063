"""What is told about a policy of megatron before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.checks.train import check, unsupported, warnings_of
from posttrain.registry import is_installed

TWO = {"engine": "megatron", "tensor_parallel": 2}
PPO = {"advantage": {"name": "gae"}}
# Looked for, not imported, as the checks do: that takes seconds.
installed = pytest.mark.skipif(not (is_installed("megatron") and is_installed("ray")), reason="needs megatron and ray")


def config(policy: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    given = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "placement": {"devices": 2}, **sections}
    return RunConfig.model_validate({**given, "policy": policy})


@installed
def test_two_devices_are_built() -> None:
    for sizes in (TWO, {"engine": "megatron", "pipeline_parallel": 2}, {"engine": "megatron", "sequence_parallel": 2}):
        assert check(config(sizes)) == unsupported(config(sizes)) == warnings_of(config(sizes)) == []


@pytest.mark.parametrize(
    ("policy", "sections", "said"),
    [
        (
            TWO | {"lora": {"dropout": 0.1}},
            {},
            "policy.lora.dropout is 0.1, and megatron's ranks would not drop out the same",
        ),
        (TWO | {"engine_options": {"tensor_paralel": 2}}, {}, "megatron has no option tensor_paralel"),
        (TWO, PPO | {"critic": TWO | {"lora": {"dropout": 0.1}}}, "critic.lora.dropout is 0.1, and megatron's ranks"),
        (TWO, PPO | {"critic": TWO | {"engine_options": {"mo": 1}}}, "megatron has no option mo"),
        (TWO, {"loss": {"kl_coef": 0.1, "kl_estimator": "full"}}, "which megatron's ranks have parts of"),
    ],
)
def test_what_is_wrong(policy: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    assert said in " | ".join(str(problem) for problem in check(config(policy, **sections)))


@installed
@pytest.mark.parametrize(
    ("policy", "sections", "said"),
    [
        (TWO | {"engine_options": {"expert_model_parallel_size": 1}}, {}, ""),
        (TWO | {"engine_options": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}}, {}, ""),
        (TWO | {"engine_options": {"moe_aux_loss_coeff": 0.01}}, {}, ""),
        (TWO, PPO | {"critic": TWO | {"engine_options": {"moe_z_loss_coeff": 1}}}, ""),
        (
            TWO,
            PPO | {"critic": TWO | {"engine_options": {"expert_tensor_parallel_size": 1}}},
            "policy.engine_options.expert_tensor_parallel_size is None and critic.engine_options.expert_tensor_parallel_size "
            "is 1 on the same devices; this version cannot run it",
        ),
        (TWO, PPO | {"critic": TWO}, ""),
        (
            TWO,
            PPO | {"critic": {"engine": "megatron"}},
            "policy.tensor_parallel is 2 and critic.tensor_parallel is 1 on the same devices; this version cannot run it",
        ),
        ({"engine": "fsdp"}, PPO | {"critic": TWO}, ""),
    ],
)
def test_what_is_planned(policy: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    assert [said in problem.what for problem in unsupported(config(policy, **sections))] == [True] * bool(said)


@installed
@pytest.mark.parametrize(
    "option", [{"virtual_pipeline_model_parallel_size": 2}, {"num_layers_per_virtual_pipeline_stage": 1}]
)
def test_virtual_stages_are_built_and_need_a_pipeline(option: dict[str, int]) -> None:
    staged = config({"engine": "megatron", "pipeline_parallel": 2, "engine_options": option})
    assert check(staged) == unsupported(staged) == warnings_of(staged) == []
    (told,) = warnings_of(config(TWO | {"engine_options": option}))
    (name,) = option
    assert told == f"policy.engine_options.{name} has no effect: policy.pipeline_parallel is 1, so there are no stages"


def test_a_critic_elsewhere_is_split_in_its_own_way() -> None:
    policy = TWO | {"devices": [0, 1]}
    critic = {"engine": "megatron", "pipeline_parallel": 2, "devices": [2, 3]}
    four = config(policy, **PPO, critic=critic, placement={"devices": 4})
    assert check(four) == [] and not any("critic" in problem.what for problem in unsupported(four))


def test_what_has_no_effect_with_a_critic() -> None:
    options = {"virtual_pipeline_model_parallel_size": 2, "param_offload": True}
    critic = TWO | {"activation_offload": True, "engine_options": options}
    told = " | ".join(warnings_of(config({"engine": "fsdp"}, **PPO, critic=critic)))
    assert "critic.engine_options.virtual_pipeline_model_parallel_size has no effect" in told
    assert "critic.engine_options.param_offload has no effect" in told
    assert "critic.activation_offload has no effect" in told


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
