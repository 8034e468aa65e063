"""What cannot be done with prompts that hold images."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.plan.checks.images import image_problems, sampler_problems
from posttrain.plan.checks.train import warnings_of


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train_files": ["t.jsonl"]}, "reward": {"terms": [{"name": "math"}]}}
        | sections
    )


@pytest.mark.parametrize("engine", ["native", "hf", "vllm"])
def test_what_reads_images(engine: str) -> None:
    assert [*image_problems(config(rollout={"engine": engine}))] == []


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"rollout": {"engine": "sglang"}}, "rollout.engine"),
        ({"policy": {"engine": "megatron"}}, "policy.engine"),
        ({"advantage": {"name": "gae"}, "critic": {"engine": "megatron"}}, "critic.engine"),
        ({"environment": {"name": "text_game"}}, "environment"),
        ({"reward": {"model": {"path": "r", "own_template": True}}}, "reward.model.own_template"),
        ({"reward": {"model": {"path": "r", "engine": "megatron"}}}, "reward.model.engine"),
        ({"tracking": {"batches_every_steps": 2}}, "tracking.batches_every_steps"),
    ],
)
def test_what_reads_text_only(sections: dict[str, Any], field: str) -> None:
    problems = [*image_problems(config(**sections))]
    assert [problem.field for problem in problems] == [field]
    assert "images" in problems[0].what
    assert problems[0].fix


def test_a_critic_and_a_reward_model_that_read_the_policy_s_tokens_see_the_images() -> None:
    assert not [*image_problems(config(advantage={"name": "gae"}, reward={"model": {"path": "r"}}))]


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_images_on_several_devices(engine: str) -> None:
    sections = {"policy": {"engine": engine}, "advantage": {"name": "gae"}, "critic": {"engine": engine}}
    assert [*image_problems(config(**sections))] == []


def test_a_sampler_of_text_is_told_what_to_use() -> None:
    (problem,) = sampler_problems(RolloutConfig(engine="sglang"))
    assert problem.fix == "use rollout.engine=native, hf or vllm"
    for server in ({"endpoints": ["http://host:8000"]}, {"engine_options": {"python": "/venv/bin/python"}}):
        (problem,) = sampler_problems(RolloutConfig.model_validate({"engine": "vllm", **server}))
        assert "a server of vllm takes token ids without images" in problem.what


def test_freezing_beside_an_adapter_has_no_effect() -> None:
    told = warnings_of(config(model={"path": "m", "freeze_vision": True}, policy={"lora": {}}))
    assert "model.freeze_vision has no effect: policy.lora trains an adapter on the language model alone" in told
    assert not any("freeze_vision" in text for text in warnings_of(config(model={"path": "m", "freeze_vision": True})))
    told = warnings_of(config(advantage={"name": "gae"}, critic={"freeze": ["model."], "lora": {}}))
    assert "critic.freeze has no effect: critic.lora trains an adapter, and no weight of the model" in told
