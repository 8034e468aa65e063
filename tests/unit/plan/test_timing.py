"""Seconds of a step: worked out by hand for a tiny model on a machine of round numbers; proposals keep their word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.config.machine import MachineConfig
from posttrain.dialects.native import read
from posttrain.errors import ConfigError
from posttrain.plan.batch import plan_batches
from posttrain.plan.estimate import role_shapes
from posttrain.plan.experts import ExpertLayers
from posttrain.plan.fit import GIB, RESERVE
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.roles import place
from posttrain.plan.timing.machine_file import read_machine
from posttrain.plan.timing.proposals import propose
from posttrain.plan.timing.seconds import Work, met_weights, step_time
from posttrain.plan.timing.weight_links import weight_sync_time

# 1000 weights, 200 of them the embeddings that are the head, too.
SHAPE = ModelShape(
    parameters=1000, layers=4, hidden=8, query_width=8, key_value_width=2, heads=4, key_value_heads=1,
    vocabulary=24, outer_parameters=200,
)  # fmt: skip
ATTAINED = {"training": 0.5, "scoring": 1.0, "decoding": 1.0, "links": 0.5}
# 10^6 FLOP/s, 10^6 bytes/s of memory, 10^4 within a node, 10^3 between nodes, no latency.
MACHINE = MachineConfig.model_validate(
    {"devices_per_node": 4, "tflops": 1e-6, "memory_gib": 1, "memory_gb_s": 1e-3, "link_gb_s": 1e-5, "latency_us": 0,
     "driver_gb_s": 1e-3, "attained": ATTAINED}
)  # fmt: skip
# Forward over 16 sequences of 10 tokens, each with its own prompt: 2 x 1000 a token, and 128 for each of 50 positions a sequence.
WHOLE = 16 * (2000 * 10 + 128 * 50)
APART = {"share_prompts": False}


def parts(shape: ModelShape = SHAPE, machine: MachineConfig = MACHINE, **sections: Any) -> dict[str, Work]:
    values = {
        "model": {"path": "x", "compute_dtype": "bfloat16"},
        "data": {"train_files": ["x"], "prompts_per_step": 4, "max_prompt_tokens": 6},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4, "max_concurrent_sequences": 8},
        **sections,
    }
    config = RunConfig.model_validate(values)
    plan, _ = place(config)
    batches, _ = plan_batches(config, None)
    assert plan is not None and batches is not None
    shapes = {role.role: shape for role in plan.roles}
    return {each.what: each for each in step_time(config, batches, plan, shapes, machine).parts}


def test_one_device_by_hand() -> None:
    micro = "sequences_per_micro_batch_per_device"
    found = parts(loss={"kl_coef": 0.1}, policy={micro: 2}, reference={micro: 4})
    # Micro-batches of 2 (policy) and 4 (reference) share a prompt: 6 / 2 + 4 = 7 tokens a row, 6 / 4 + 4 = 5.5. Positions
    # attended to: 36 / 2 / 2 + 4 x (6 + 2) = 41 and 36 / 2 / 4 + 32 = 36.5, each 4 x 8 wide x 4 layers = 128 FLOP.
    assert found["policy"].computing == pytest.approx(16 * 3 * (2000 * 7 + 128 * 41) / (1e6 * 0.5))
    assert found["reference log-probs"].computing == pytest.approx(16 * (2000 * 5.5 + 128 * 36.5) / 1e6)
    # Prefill: 4 prompts of 6 tokens, 2000 + 2 x 6 x 8 x 4 = 2384 each. Two waves of 8 responses, 4 steps each: 1000 weights of
    # 2 bytes and 8 caches of 6 + 2 tokens x 2 x 2 x 4 layers x 2 bytes = 2048 read (4.0 ms); 2 x 1000 x 8 FLOP take 16 ms.
    assert found["sampling"].computing == pytest.approx(24 * 2384 / 1e6 + 2 * 4 * 0.016)
    assert all(each.sending == 0 for each in found.values())


def test_decoding_waits_for_the_memory_where_that_is_slower() -> None:
    slow = MACHINE.model_copy(update={"memory_gb_s": 1e-4})
    assert parts(machine=slow)["sampling"].computing == pytest.approx(24 * 2384 / 1e6 + 2 * 4 * (2000 + 2048) / 1e5)


def test_recomputing_costs_a_forward_pass() -> None:
    found = parts(
        model={"path": "x", "compute_dtype": "bfloat16", "gradient_checkpointing": True},
        policy={"share_prompts": False},
    )
    assert found["policy"].computing == pytest.approx(WHOLE * 4 / 5e5)


def test_links_between_nodes_are_slower_than_within() -> None:
    placed = {
        "placement": {"devices": 4, "nodes": 2},
        "policy": {"engine": "fsdp", "engine_options": {"fsdp_size": 2}} | APART,
    }
    machine = MACHINE.model_copy(update={"nodes": 2, "devices_per_node": 2, "network_gb_s": 1e-6})
    found = parts(machine=machine, **placed)
    # 4 sequences on a device in one micro-batch. Gathering half of 2000 bytes twice, within a node: 2000 / (1e4 x 0.5).
    # Gradients: half of 4000 bytes within, then 2 x 1/2 of 2000 between the nodes, all at the slower 1e3 x 0.5.
    assert found["policy"].sending == pytest.approx(2000 / 5e3 + (2000 + 2000) / 5e2)
    # Every device has its own rows: a quarter of the work.
    assert found["policy"].computing == pytest.approx(WHOLE * 3 / 4 / 5e5)


def test_the_driver_serves_one_copy_after_another() -> None:
    found = parts(placement={"devices": 4}, policy={"engine": "fsdp"})
    # 16 samples of 625 bytes, and 4 bytes of text for each of 160 tokens
    assert found["driver"].sending == pytest.approx((16 * 625 + 160 * 4) / 1e6)


def test_a_pipeline_fills_and_empties() -> None:
    policy = {"engine": "megatron", "pipeline_parallel": 4, "sequences_per_micro_batch_per_device": 4} | APART
    found = parts(placement={"devices": 4}, policy=policy)
    # 4 micro-batches over 4 stages: (4 + 3) / 4 of the time.
    assert found["policy"].computing == pytest.approx(WHOLE * 3 / 4 / 5e5 * 7 / 4)


def test_tokens_meet_the_chosen_experts_alone() -> None:
    # 4 layers x 4 experts x 3 x 8 x 1 = 384 weights, of which 2 of 4 experts are met: 192 are not.
    experts = ExpertLayers(experts=4, chosen=2, width=1, shared_width=0, normalised=True, layers=(True,) * 4)
    assert met_weights(replace(SHAPE, experts=experts)) == 1000 - 192
    # Embeddings apart from the head are looked up: 24 x 8 of 392.
    assert met_weights(replace(SHAPE, outer_parameters=392)) == 1000 - 200


@pytest.mark.parametrize("apart", [True, False])
def test_sampling_ahead_hides_the_shorter_side_on_devices_of_its_own(apart: bool) -> None:
    placed = {"placement": {"devices": 2}, "policy": {"devices": [0]}, "rollout": {"devices": [1]}} if apart else {}
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "asynchronous": {"mode": "one_step"}} | placed
    )
    plan, _ = place(config)
    batches, _ = plan_batches(config, None)
    assert plan is not None and batches is not None
    time = step_time(config, batches, plan, {role.role: SHAPE for role in plan.roles}, MACHINE)
    sampling = next(each.seconds for each in time.parts if each.what == "sampling")
    rest = sum(each.seconds for each in time.parts) - sampling
    assert time.seconds == pytest.approx(max(sampling, rest) if apart else sampling + rest)


QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
GIVEN = ["data.train_files=[t.jsonl]", "reward.terms=[{name: exact_match}]", "data.prompts_per_step=128"]
GIVEN += ["rollout.samples_per_prompt=8", "rollout.engine=vllm", "rollout.max_response_tokens=1024"]


@pytest.mark.parametrize("asynchronous", [[], ["asynchronous.mode=separate", "loss.rollout_correction.weights=token"]])
def test_a_proposal_can_be_run_as_written(tmp_path: Path, asynchronous: list[str]) -> None:
    """Its settings, added to the file, plan without a problem, take the seconds it said, and fit."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    given = [*GIVEN, f"model.path={tmp_path}", *asynchronous]
    machine = read_machine("2x4xH100")
    found = propose(read(None, given).checked().config, machine)
    assert found is not None and len(found.best) == 3
    times = [each.time.seconds for each in found.best]
    assert times == sorted(times)
    for each in found.best:
        config = read(None, [*given, *each.settings]).checked().config
        plan, problems = place(config)
        batches, wrong = plan_batches(config, None)
        assert plan is not None and batches is not None, [*problems, *wrong]
        assert (plan.devices, plan.nodes) == (8, 2)
        assert each.bytes <= machine.memory_gib * GIB * (1 - RESERVE)
        again = step_time(config, batches, plan, role_shapes(config), machine)
        assert again.seconds == pytest.approx(each.time.seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH300", "no accelerator is called H300 here; did you mean H800?"),
        ("0x8xH100", "has no device"),
        ("missing.yaml", "missing.yaml"),
    ],
)
def test_a_machine_that_is_not_there(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_machine(text)
    assert message in str(caught.value)


def test_a_machine_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    numbers = "devices_per_node: 8\ntflops: 100\nmemory_gib: 80\nmemory_gb_s: 2000\nlink_gb_s: 300\n"
    file.write_text(numbers + "attained: {training: 0.3}\n")
    machine = read_machine(str(file))
    assert machine.devices == 8 and machine.attained.training == 0.3 and machine.attained.links == 0.75
    file.write_text("nodes: 4\n" + numbers)
    with pytest.raises(ConfigError, match=r"network_gb_s is missing.*machine.yaml:1"):
        read_machine(str(file))
    file.write_text(numbers + "memory_gbs: 1\n")
    with pytest.raises(ConfigError, match=r"memory_gbs.*machine.yaml:6"):
        read_machine(str(file))


def links(**sections: Any) -> tuple[dict[str, tuple[int, int, float | None]], float]:
    """The links of a weight sync by name: how many, bytes of each and seconds; and its seconds. A policy on devices 0 and 1."""
    values = {
        "model": {"path": "x", "compute_dtype": "bfloat16"},
        "data": {"train_files": ["x"], "prompts_per_step": 4, "max_prompt_tokens": 6},
        "placement": {"devices": 8, "nodes": 4},
        "policy": {"engine": "fsdp", "devices": [0, 1]},
        **sections,
    }
    config = RunConfig.model_validate(values)
    plan, problems = place(config)
    assert plan is not None, problems
    # 10^4 within a node and 2 x 10^4 to its memory, 10^3 between nodes, of which half is reached
    changes = {"nodes": 4, "devices_per_node": 2, "network_gb_s": 1e-6, "host_gb_s": 2e-5, "latency_us": 1000}
    found = weight_sync_time(config, plan, SHAPE, MACHINE.model_copy(update=changes))
    return {each.what: (each.count, each.bytes, each.seconds) for each in found.links}, found.seconds


def test_new_weights_by_link() -> None:
    # 1000 weights of 2 bytes; half of them are on each of 2 devices. 3 nodes with 2 samplers each.
    elsewhere = {"engine": "vllm", "devices": [2, 3, 4, 5, 6, 7]}
    found, seconds = links(rollout=elsewhere)
    assert found == {
        "gather": (2, 1000, pytest.approx(1000 / 5e3)),
        "first device to its node's memory": (1, 2000, pytest.approx(0.2)),
        "out of the first node, at most": (1, 6000, pytest.approx(12.0)),
        "a node's memory to a copy on it": (6, 2000, pytest.approx(0.2)),
    }
    # One bucket: gathered and copied (0.4 s), then fetched and taken (12.2 s), and a message
    assert seconds == pytest.approx(0.4 + 12.2 + 0.001)
    found, seconds = links(rollout=elsewhere | {"weight_sync": "collective"})
    assert found["broadcast"] == (6, 2000, pytest.approx(4.0)) and "out of the first node, at most" not in found
    assert seconds == pytest.approx(0.2 + 4.0 + 0.001)
    found, seconds = links(rollout=elsewhere | {"weight_sync": "disk", "weight_folder": "/x"})
    assert found["folder to each copy"] == (6, 2000, None) and seconds == pytest.approx(0.2 + 0.001)
    # Two devices of one copy take it together
    found, _ = links(rollout=elsewhere | {"tensor_parallel": 2})
    assert found["a node's memory to a copy on it"][0] == 3


def test_copies_over_several_nodes_get_a_broadcast() -> None:
    """Shared memory reaches one node of a copy, so `auto` is a broadcast there, to every device."""
    devices = {"engine": "vllm", "devices": [4, 5, 6, 7], "tensor_parallel": 4}
    found, seconds = links(rollout=devices)
    assert found == {
        "gather": (2, 1000, pytest.approx(1000 / 5e3)),
        "broadcast": (4, 2000, pytest.approx(2000 / 500)),
    }
    assert seconds == pytest.approx(0.2 + 4.0 + 0.001)
    assert (found, seconds) == links(rollout=devices | {"weight_sync": "collective"})
    # An engine that takes no broadcast reads a folder
    found, _ = links(rollout=devices | {"engine": "sglang"})
    assert list(found) == ["gather", "first device to the folder", "folder to each copy"]


def test_new_weights_stay_on_the_node_of_a_sampler_beside_the_policy() -> None:
    found, _ = links(placement={"devices": 2}, policy={"devices": [0]}, rollout={"engine": "vllm", "devices": [1]})
    assert list(found) == ["first device to its node's memory", "a node's memory to a copy on it"]
    # A sampler in the process of a policy in parts gathers; of a whole policy it reads the weights
    assert list(links(placement={"devices": 2}, rollout={"engine": "native", "devices": [0, 1]})[0]) == ["gather"]
    assert links(placement={"devices": 1}, policy={"engine": "local"}, rollout={"engine": "native"}) == ({}, 0.0)
