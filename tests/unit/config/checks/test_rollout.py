"""Rules about the sampler."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.checks import rollout
from posttrain.config.checks.rollout import (
    missing_sampler,
    rollout_problems,
    rollout_warnings,
    sampler_problems,
    training_sampler_warnings,
)
from posttrain.config.domains import DomainConfig
from posttrain.config.lora import LoraConfig
from posttrain.config.rollout import RolloutConfig


def problems(**settings: Any) -> list[str]:
    return [f"{problem.field}: {problem.what}" for problem in sampler_problems(RolloutConfig(**settings))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine": "hf"},
        {"engine": "vllm"},
        {"engine": "vllm", "weight_sync": "collective"},
        {"engine": "vllm", "endpoints": ["127.0.0.1:8000", "http://localhost:8001"]},
        {"engine": "sglang", "endpoints": ["http://gpu1:30000"], "weight_folder": "/shared"},
        {"engine": "vllm", "endpoints": ["http://gpu1:8000"], "weight_sync": "collective"},
        {"engine": "http", "endpoints": ["http://localhost:8000"]},
    ],
)
def test_what_goes_together(settings: dict[str, Any]) -> None:
    assert problems(**settings) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine": "http"}, "rollout.endpoints: http needs servers"),
        (
            {"engine": "native", "weight_sync": "disk"},
            "rollout.weight_sync: native reads the trainer's own weights, so there is nothing to send by disk",
        ),
        (
            {"engine": "hf", "weight_sync": "collective"},
            "rollout.weight_sync: hf reads the trainer's own weights, so there is nothing to send by collective",
        ),
        (
            {"engine": "native", "weight_sync": "adapter"},
            "rollout.weight_sync: native reads the trainer's own weights, so there is nothing to send by adapter",
        ),
        (
            {"engine": "sglang", "weight_sync": "adapter"},
            "rollout.weight_sync: sglang is sent whole weights, with the adapter merged into them",
        ),
        (
            {"engine": "vllm", "weight_sync": "in_memory"},
            "rollout.weight_sync: vllm has a copy of the weights in another place, which in_memory cannot reach",
        ),
        (
            {"engine": "sglang", "weight_sync": "collective"},
            "rollout.weight_sync: collective sends weights to one vLLM server",
        ),
        (
            {"engine": "vllm", "weight_sync": "collective", "endpoints": ["localhost:1", "localhost:2"]},
            "rollout.weight_sync: collective sends weights to one vLLM server",
        ),
        (
            {"engine": "vllm", "endpoints": ["http://gpu1:8000"]},
            "rollout.weight_folder: http://gpu1:8000 is on another machine, and weights go through a folder that it must see",
        ),
        (
            {"engine": "vllm", "endpoints": ["ftp://localhost"]},
            "rollout.endpoints: ftp://localhost is not the address of a server",
        ),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], expected: str) -> None:
    assert problems(**settings) == [expected]


def warned(**settings: Any) -> list[str]:
    return list(rollout_warnings(RolloutConfig(**settings)))


def test_settings_of_servers_have_no_effect_without_one() -> None:
    settings = {"endpoints": ["h:1"], "timeout_s": 5, "retries": 0, "weight_folder": "/x", "weight_bucket_mib": 1}
    for engine in ("native", "hf"):
        found = warned(engine=engine, **settings)
        assert [text.split(" ")[0] for text in found] == [f"rollout.{name}" for name in settings]
        assert all(f"no effect: {engine} samples in this process" in text for text in found)
    assert warned(engine="vllm", **settings) == []


def test_servers_that_run_already_are_not_started_with_options() -> None:
    options = {"gpu_memory_utilization": 0.5, "api_key_env": "KEY", "weight_sync_backend": "gloo", "seed": None}
    settings: dict[str, Any] = {"engine": "vllm", "engine_options": options, "tensor_parallel": 2}
    unread = ["rollout.engine_options.gpu_memory_utilization", "rollout.tensor_parallel"]
    found = warned(endpoints=["h:1"], **settings)
    assert [
        text.partition(" has no effect: the servers of rollout.endpoints run already")[0] for text in found
    ] == unread
    # the processes of a server that shares the model are those that a broadcast goes to
    assert len(warned(endpoints=["h:1"], weight_sync="collective", **settings)) == 1
    assert warned(**settings) == []


def test_what_hf_and_collective_do_not_read() -> None:
    found = warned(engine="hf", max_prefill_tokens=1, engine_options={"dtype": "float32"})
    assert [text.partition(" has no effect")[0] for text in found] == [
        "rollout.max_prefill_tokens",
        "rollout.engine_options",
    ]
    [text] = warned(engine="vllm", weight_sync="collective", weight_folder="/x")
    assert text.startswith("rollout.weight_folder has no effect")


def test_what_sglang_does_otherwise() -> None:
    seeded = {"engine_options": {"enable_deterministic_inference": True}}
    assert warned(engine="sglang", **seeded) == []
    assert "before top_k, top_p and min_p" in warned(engine="sglang", top_k=5, **seeded)[0]
    assert "not reproducible" in warned(engine="sglang")[0]


def test_missing_libraries_are_told_with_every_way_to_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here: set[str] = set()
    monkeypatch.setattr(rollout, "is_installed", here.__contains__)

    def missing(**settings: Any) -> list[str]:
        return [problem.what for problem in missing_sampler(RolloutConfig(**settings))]

    assert missing(engine="native") == missing(engine="hf") == []
    assert missing(engine="vllm") == ["vllm is not installed in this Python"]
    assert len(missing(engine="sglang")) == 2
    no_http = "httpx2 is not installed (needed by rollout.engine=vllm)"
    assert missing(engine="vllm", endpoints=["h:1"]) == [no_http]
    assert missing(engine="vllm", engine_options={"python": "/x"}) == [no_http]
    here.add("httpx2")
    assert missing(engine="vllm", endpoints=["h:1"]) == missing(engine="http", endpoints=["h:1"]) == []
    here.add("vllm")
    assert missing(engine="vllm") == []
    [problem] = missing_sampler(RolloutConfig(engine="sglang"))
    assert all(
        way in problem.fix for way in ("engine_options.python", "rollout.endpoints", "posttrain[sglang]", "native")
    )


def run(lora: LoraConfig | None, devices: int = 1, **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["a"]},
            "rollout": settings,
            "policy": {"lora": lora},
            "placement": {"devices": devices},
        }
    )


def test_an_adapter_alone_needs_one_that_vllm_takes() -> None:
    def found(lora: LoraConfig | None, sync: str) -> list[str]:
        return [problem.what for problem in rollout_problems(run(lora, engine="vllm", weight_sync=sync))]

    assert found(LoraConfig(rank=512), "adapter") == found(None, "disk") == []
    assert found(None, "adapter") == ["rollout.weight_sync=adapter sends an adapter, and the policy has none"]
    assert found(LoraConfig(rank=513), "adapter") == ["vLLM takes adapters up to rank 512, and policy.lora.rank is 513"]


@pytest.mark.parametrize(
    ("section", "name", "engine", "refused"),
    [
        ("rollout", "first_token_temperature", "vllm", True),
        ("rollout", "temperature", "vllm", True),
        ("validation", "temperature", "vllm", True),
        ("rollout", "first_token_temperature", "native", False),
    ],
)
def test_temperatures_that_an_engine_does_not_take(section: str, name: str, engine: str, refused: bool) -> None:
    """vLLM answers a request above 2 with an error, in the first step."""
    values = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "rollout": {"engine": engine}}
    values[section] = values.get(section, {}) | {name: 30.0}
    found = [problem.field for problem in rollout_problems(RunConfig.model_validate(values))]
    assert found == ([f"{section}.{name}"] if refused else [])


def test_what_has_no_effect_where_the_adapter_is_sent_alone() -> None:
    settings = {"engine": "vllm", "engine_options": {"load_format": "dummy_dtensor"}, "weight_bucket_mib": 1}
    assert list(training_sampler_warnings(run(None, **settings))) == []
    base, bucket = training_sampler_warnings(run(LoraConfig(), **settings))
    assert "load_format=dummy has no effect: vllm is sent the adapter alone" in base
    assert "weight_bucket_mib has no effect" in bucket
    assert list(training_sampler_warnings(run(LoraConfig(), weight_sync="disk", **settings))) == []
    # between workers of Ray an adapter travels in buckets, and to servers that run already as a file of that name
    assert list(training_sampler_warnings(run(LoraConfig(), devices=2, **settings))) == [base]
    running = settings | {"endpoints": ["h:1"], "weight_sync": "adapter"}
    assert bucket in list(training_sampler_warnings(run(LoraConfig(), devices=2, **running)))


def test_hashes_are_told_on_one_device() -> None:
    assert list(training_sampler_warnings(run(None, weight_hash_every_steps=5))) == []
    [text] = training_sampler_warnings(run(None, devices=2, weight_hash_every_steps=5))
    assert text.startswith("rollout.weight_hash_every_steps has no effect on several devices")


def test_steps_of_a_folder_need_the_folder() -> None:
    fields = [problem.field for problem in rollout_problems(run(None, replay_steps=[1]))]
    assert fields == ["rollout.replay_steps"]
    assert list(rollout_problems(run(None, replay_steps=[1], replay_folder="kept"))) == []


def test_groups_that_are_kept_one_by_one_need_their_order() -> None:
    def problems(data: dict[str, Any], **settings: Any) -> list[str]:
        given = run_of(rollout={"replay_folder": "kept"}, asynchronous=settings)
        config = given.model_copy(update={"data": given.data.model_copy(update=data)})
        return [problem.what.rpartition(" with ")[2] for problem in rollout_problems(config)]

    assert problems({}, mode="colocate") == problems({}, mode="separate") == []
    assert problems({}, mode="one_step", on_stale="drop") == []
    [dropped] = problems({}, mode="separate", on_stale="drop")
    assert dropped.startswith("asynchronous.on_stale=drop")
    [domains] = problems({"domains": {"a": DomainConfig(sources=["s"], prompts_per_step=1)}}, mode="colocate")
    assert domains.startswith("data.domains")


def run_of(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["x.jsonl"]}, **sections})


@pytest.mark.parametrize(
    ("loss", "weights", "warned"),
    [
        ({}, "token", False),
        ({"rollout_correction": {"weight_high": 3.0}}, "token", False),
        ({"name": "gpg"}, "token", False),
        ({"name": "gspo"}, "token", False),
        ({"rollout_correction": {"weights": "sequence"}}, "sequence", False),
        # a user's choice is kept, and reported
        ({"rollout_correction": {"weights": "none"}}, "none", True),
        # the ratio is to the sampler already
        ({"name": "rollout_is"}, "none", False),
        ({"rollout_correction": {"use_rollout_logprobs": True}}, "none", False),
        # gpg has no ratio
        ({"name": "gpg", "rollout_correction": {"use_rollout_logprobs": True}}, "token", False),
    ],
)
def test_rounded_weights_are_corrected_for_unless_weights_are_set(
    loss: dict[str, Any], weights: str, warned: bool
) -> None:
    config = run_of(rollout={"weights": "int8"}, loss=loss)
    assert config.loss.rollout_correction.weights == weights
    found = [text for text in training_sampler_warnings(config) if "rounded weights" in text]
    assert bool(found) is warned
    exact = run_of(loss=loss).loss.rollout_correction
    assert exact.weights == loss.get("rollout_correction", {}).get("weights", "none")
    # what a run saves is read again as it was
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_wrong_loss_is_reported_with_rounded_weights_too() -> None:
    with pytest.raises(ValueError, match="clip_ratio_low"):
        run_of(rollout={"weights": "int8"}, loss={"clip_ratio_low": "much"})
    assert run_of(rollout={"weights": "int8"}, loss={"name": "unknown"}).loss.name == "unknown"


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang", "http"])
def test_other_engines_do_not_round_weights(engine: str) -> None:
    (found,) = [each for each in sampler_problems(RolloutConfig(engine=engine, weights="int8")) if "round" in each.what]
    assert found.field == "rollout.weights" and engine in found.what
    assert found.fix == "use rollout.engine=native, or rollout.weights=compute_dtype"


@pytest.mark.parametrize(("enters", "refused"), [("loss", True), ("advantage", False)])
def test_a_divergence_that_is_the_whole_loss_takes_no_correction(enters: str, refused: bool) -> None:
    teachers = {"teachers": {"one": {"path": "t"}}, "enters": enters}
    config = run_of(rollout={"weights": "int8"}, distillation=teachers)
    found = [each.fix for each in rollout_problems(config) if each.field == "rollout.weights"]
    assert bool(found) is refused
    assert not refused or "rollout.weights=compute_dtype, or distillation.enters=advantage" in found[0]
