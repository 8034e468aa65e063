"""Where roles are, by hand; what cannot be, and what is said about it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.plan_devices import devices_text
from posttrain.config import RunConfig, SftConfig
from posttrain.plan.batch import plan_batches
from posttrain.plan.checks.distillation import distillation_warnings
from posttrain.plan.estimate import estimate, estimate_sft, peak
from posttrain.plan.heads import head_problems
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.sft import plan_sft

LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
    "intermediate_size": 128,
}  # fmt: skip


def config(path: str = "x", **sections: dict[str, Any]) -> RunConfig:
    values = {"model": {"path": path}, "data": {"train_files": ["x"]}, **sections}
    return RunConfig.model_validate(values)


def planned(**sections: dict[str, Any]) -> PlacementPlan:
    plan, problems = place(config(**sections))
    assert plan is not None, problems
    return plan


def refused(**sections: dict[str, Any]) -> str:
    plan, problems = place(config(**sections))
    assert plan is None
    return "\n".join(map(str, problems))


def test_one_device_is_one_process_whose_sampler_reads_the_policys_weights() -> None:
    plan = planned()
    assert plan.runtime == "inprocess" and [role.role for role in plan.roles] == ["rollout", "policy"]
    assert plan.roles[0].uses_weights_of == "policy" and plan.roles[0].shared_with == ("policy",)


def test_ranks_have_nodes_and_numbers_on_them() -> None:
    plan = planned(
        placement={"devices": 8, "nodes": 2},
        policy={"engine": "fsdp", "devices": [6, 7, 0, 1]},
        rollout={"devices": [2]},
    )
    policy = plan.role("policy")
    assert plan.runtime == "ray" and plan.devices_per_node == 4 and policy is not None
    assert [(rank.rank, rank.node, rank.local_device) for rank in policy.ranks] == [
        (0, 1, 2),
        (1, 1, 3),
        (2, 0, 0),
        (3, 0, 1),
    ]
    assert plan.idle == (3, 4, 5)
    assert [(pool.devices, pool.roles) for pool in plan.pools] == [((0, 1, 6, 7), ("policy",)), ((2,), ("rollout",))]


@pytest.mark.parametrize(
    ("policy", "devices", "expected"),
    [
        ({"engine": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}, [4], ("local", 1, 1, 1)),
        ({"engine": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}, [4, 5], ("fsdp", 1, 1, 2)),
        ({"engine": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}, [4, 5, 6, 7], ("megatron", 2, 1, 1)),
        ({"engine": "fsdp", "sequence_parallel": 4}, [4, 5], ("fsdp", 1, 1, 2)),
        ({"engine": "fsdp", "sequence_parallel": 2}, [4, 5], ("fsdp", 1, 2, 2)),
        # no group of 4 that share experts
        ({"engine": "megatron", "engine_options": {"expert_model_parallel_size": 4}}, [4, 5], ("fsdp", 1, 1, 2)),
    ],
)  # fmt: skip
def test_a_teacher_is_split_as_the_policy_is_where_its_devices_take_a_copy_of_it(
    policy: dict[str, Any], devices: list[int], expected: tuple[str, int, int, int]
) -> None:
    asked = config(
        placement={"devices": 8},
        policy={**policy, "devices": [0, 1, 2, 3]},
        rollout={"devices": [0, 1, 2, 3]},
        distillation={"teachers": {"one": {"path": "y", "devices": devices}}, "divergence": {"name": "sampled_kl"}},
    )
    plan, problems = place(asked)
    assert plan is not None, problems
    teacher = plan.role("teacher one")
    assert teacher is not None
    sizes = teacher.sizes
    assert (teacher.engine, sizes.tensor, sizes.sequence, sizes.shard) == expected
    told = [text for text in distillation_warnings(asked) if text.startswith("the teacher one")]
    count = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
    how = {"local": "whole", "fsdp": "sharded over them by fsdp"}.get(expected[0])
    other = how is not None and expected != ("fsdp", 1, 2, 2)
    assert told == [f"the teacher one is on {count} of its own, too few for the policy's split: it is {how}"] * other


def test_groups_of_a_split_role() -> None:
    # 8 ranks = tensor 2 x context 2 x data 1 x pipeline 2
    plan = planned(
        placement={"devices": 8},
        policy={"engine": "megatron", "tensor_parallel": 2, "sequence_parallel": 2, "pipeline_parallel": 2},
    )
    policy = plan.role("policy")
    assert policy is not None and policy.copies == 1 and policy.sizes.context == 2 and policy.sizes.sequence == 1
    assert policy.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert policy.groups("sequence") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert policy.groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert policy.groups("data") == tuple((rank,) for rank in range(8))


def test_hybrid_sharding_and_shared_sequences() -> None:
    fsdp = {"engine": "fsdp", "sequence_parallel": 2, "engine_options": {"fsdp_size": 4}}
    policy = planned(placement={"devices": 8}, policy=fsdp).role("policy")
    assert policy is not None and (policy.copies, policy.devices_per_copy, policy.sizes.shard) == (4, 2, 4)
    assert policy.groups("sequence") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert policy.groups("data") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert policy.groups("shard") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert policy.groups("replica") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_roles_that_take_turns_and_one_that_leaves() -> None:
    plan = planned(
        placement={"devices": 2},
        policy={"engine": "fsdp"},
        loss={"kl_coef": 0.1},
        reference={"offload": True},
        rollout={"engine": "vllm", "engine_options": {"free_cache_engine": True}},
    )
    assert plan.asleep("update") == ("rollout", "reference") and plan.asleep("rollout") == ("reference",)
    assert plan.asleep("log-probs") == ("rollout",)


def test_servers_that_run_already_have_no_device() -> None:
    plan = planned(rollout={"engine": "vllm", "endpoints": ["http://a:1", "http://b:1"], "tensor_parallel": 4})
    assert plan.roles[0].ranks == () and plan.roles[0].copies == 2 and plan.roles[1].shared_with == ()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"placement": {"devices": 7, "nodes": 2}}, "7 devices do not spread evenly over 2 nodes; use placement.devices=6 or"),
        ({"placement": {"devices": 2, "runtime": "inprocess"}}, "has one process for one device, and the run has 2"),
        ({"policy": {"devices": []}}, "the policy has no device"),
        ({"policy": {"devices": [0, 3]}}, "put on device 3, and there are 1 devices, 0 to 0; use placement.devices=4"),
        ({"placement": {"devices": 2}, "rollout": {"devices": [1, 1]}}, "the rollout is put on the same device twice"),
        (
            {"placement": {"devices": 6}, "policy": {"engine": "megatron", "tensor_parallel": 4}},
            "the policy has 6 devices, which are no multiple of the 4 that share one copy (policy.tensor_parallel 4); use 8 "
            "devices, or policy.tensor_parallel=3",
        ),
        (
            {"placement": {"devices": 8}, "policy": {"engine": "megatron", "tensor_parallel": 2, "pipeline_parallel": 3}},
            "(policy.tensor_parallel 2 x policy.pipeline_parallel 3 = 6); use 12 devices",
        ),
        (
            {"placement": {"devices": 8}, "policy": {"engine": "fsdp", "engine_options": {"fsdp_size": 3}}},
            "8 devices do not split into groups of 3 that keep one copy of the weights; use "
            "policy.engine_options.fsdp_size=2",
        ),
        (
            {
                "placement": {"devices": 8},
                "policy": {"engine": "megatron", "tensor_parallel": 2, "engine_options": {"expert_model_parallel_size": 3}},
            },
            "the policy has its experts on 8 devices, which do not split into groups of 3 that share them x 2 that share each "
            "= 6; use policy.engine_options.expert_model_parallel_size=2",
        ),
        (
            {
                "placement": {"devices": 8},
                "policy": {"engine": "megatron", "engine_options": {"expert_tensor_parallel_size": 3}},
            },
            "use policy.engine_options.expert_tensor_parallel_size=1",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be(sections: dict[str, Any], said: str) -> None:
    assert said in refused(**sections)


def test_heads_that_cannot_be_shared_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    wrong = config(str(tmp_path), placement={"devices": 6}, policy={"engine": "fsdp", "sequence_parallel": 3})
    plan, _ = place(wrong)
    assert plan is not None
    (problem,) = head_problems(wrong, plan)
    assert (
        "has 8 attention heads, which 3 devices that share a sequence cannot hold in equal parts (8 / 3 = 2.667)"
        in str(problem)
    )
    assert problem.fix == "use policy.sequence_parallel=2"
    right = config(str(tmp_path), placement={"devices": 8}, policy={"engine": "fsdp", "sequence_parallel": 8})
    plan, _ = place(right)  # 2 key/value heads for 8 devices: each is held by four
    assert plan is not None and head_problems(right, plan) == []


def test_bytes_on_a_device_by_hand(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    # Attention 64 x 8 x (8 + 4) + 64 x 64 = 10240, MLP 3 x 64 x 128 = 24576, norms 128: 34944 a layer. Outside of layers: two
    # embeddings of 6400 and a norm, 12864. Together 82752.
    run = config(
        str(tmp_path),
        data={"train_files": ["x"], "max_prompt_tokens": 6},
        placement={"devices": 4},
        policy={"engine": "fsdp", "engine_options": {"fsdp_size": 2}, "sequences_per_micro_batch_per_device": 1},
        rollout={"engine": "native", "max_response_tokens": 4, "samples_per_prompt": 8},
    )
    plan, _ = place(run)
    batches, _ = plan_batches(run, None)
    assert plan is not None and batches is not None
    memory = estimate(run, batches, plan)
    assert memory is not None
    rollout, policy = memory
    assert rollout.weights == 82752 * 2  # a bfloat16 copy of its own: the policy has parts only
    assert (
        rollout.cache == 16 * 10 * 2 * 2 * 16 * 2
    )  # 64 / 4 sequences of 10 tokens, keys and values, layers, 2 x 8 wide, bytes
    # Packed copies of all but the embeddings and the last norm, whose head is 100 x 64
    assert rollout.packed == (2 * 34944 + 6400) * 2
    assert policy.weights == 82752 * 4 // 2 and policy.optimizer == 82752 * 3 * 4 // 2
    assert policy.gathered == (2 * 34944 + 12864) * 2
    assert policy.activations == 10 * 64 * 2 * 17 * 2  # tokens, hidden, layers, values, bytes
    most = peak(plan, memory)
    assert (
        most.phase == "update" and most.bytes == policy.used("update") + rollout.weights + rollout.packed
    )  # its cache has gone


@pytest.mark.parametrize(
    ("weights", "dtype", "device", "bytes_each"),
    [("compute_dtype", "float32", "cpu", 4), ("compute_dtype", "bfloat16", "cpu", 2), ("int8", "bfloat16", "cpu", 1),
     ("compute_dtype", "bfloat16", "cuda", 0)],
)  # fmt: skip
def test_packed_copies_by_hand(tmp_path: Path, weights: str, dtype: str, device: str, bytes_each: int) -> None:
    """Of two layers of 34944 weights and a head of 6400; the embeddings (6400) and the last norm (64) are not copied."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = config(
        str(tmp_path),
        model={"path": str(tmp_path), "compute_dtype": dtype},
        placement={"device": device},
        rollout={"engine": "native", "weights": weights},
    )
    plan, _ = place(run)
    batches, _ = plan_batches(run, None)
    assert plan is not None and batches is not None
    memory = estimate(run, batches, plan)
    assert memory is not None
    rollout = memory[0]
    assert (rollout.weights, rollout.packed) == (0, (2 * 34944 + 6400) * bytes_each)
    assert rollout.kept(("cache",)) == rollout.packed  # they stay during the update


@pytest.mark.parametrize(("update", "values"), [("before", 1 + 1 + 2), ("never", 1)])
def test_process_reward_model_by_hand(tmp_path: Path, update: str, values: int) -> None:
    """The policy's shape, 82752 weights: in bfloat16 twice (its reference, too); float32 masters and, where it is trained, a
    gradient and two averages; activations of 3 sequences of 6 + 4 tokens, 2 layers, 17 x 64 values of 2 bytes."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = config(
        str(tmp_path),
        data={"train_files": ["x"], "max_prompt_tokens": 6},
        placement={"device": "cuda"},
        advantage={"name": "prime"},
        reward={"process": {"update": update, "sequences_per_micro_batch": 3}},
        rollout={"engine": "native", "max_response_tokens": 4},
        policy={"sequences_per_micro_batch_per_device": 1},
    )
    plan, _ = place(run)
    batches, _ = plan_batches(run, None)
    assert plan is not None and batches is not None
    memory = estimate(run, batches, plan)
    assert memory is not None
    rollout, policy, process = memory
    activations = 3 * 10 * 64 * 2 * 17 * 2 if update == "before" else 0
    assert (process.role, process.weights, process.optimizer, process.activations) == (
        "process model", 2 * 82752 * 2, 82752 * values * 4, activations
    )  # fmt: skip
    # It stays beside the policy: its activations are more than the sampler's cache, which is more than the policy's activations
    held = policy.kept(()) + process.weights + process.optimizer
    expected = ("reward", held + activations) if update == "before" else ("rollout", held + rollout.cache)
    assert (peak(plan, memory).phase, peak(plan, memory).bytes) == expected


def test_experts_are_shared_out_besides(tmp_path: Path) -> None:
    mixed = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | mixed))
    # As above, and in every layer 4 experts of 3 x 64 x 32 and a router of 4 x 64 in the place of the MLP: 10240 + 128 + 24576 +
    # 256 = 35200 a layer, 83264 together, 49152 of them in experts.
    run = config(
        str(tmp_path),
        placement={"devices": 4},
        policy={"engine": "megatron", "tensor_parallel": 2, "engine_options": {"expert_model_parallel_size": 2}},
    )
    plan, _ = place(run)
    batches, _ = plan_batches(run, None)
    assert plan is not None and batches is not None
    policy = plan.role("policy")
    assert policy is not None and (policy.copies, policy.sizes.expert, policy.sizes.expert_tensor) == (2, 2, 2)
    assert "2 share matrices; 2 share the experts" in devices_text(plan)
    memory = estimate(run, batches, plan)
    assert memory is not None
    held = (83264 - 49152) // 2 + 49152 // 4  # half of the rest, a quarter of the experts
    assert memory[1].weights == held * 2 and memory[1].optimizer == held * (3 * 4 + 4)
    options = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "use_distributed_optimizer": True}
    policy_ = {"engine": "megatron", "tensor_parallel": 2, "engine_options": options}
    spread = config(str(tmp_path), placement={"devices": 4}, policy=policy_)
    plan, _ = place(spread)
    assert plan is not None
    memory = estimate(spread, batches, plan)
    assert memory is not None
    rest, experts = (83264 - 49152) // 2, 49152 // 2  # each on two devices, which have half of the averages
    assert memory[1].weights == (rest + experts) * 2
    assert memory[1].optimizer == (rest + experts) * (4 + 4) + (rest // 2 + experts // 2) * 2 * 4
    alone = config(
        str(tmp_path),
        placement={"devices": 2},
        policy={"engine": "megatron", "tensor_parallel": 2,
                "engine_options": {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}},
    )  # fmt: skip
    assert place(alone)[0] is not None  # every expert twice
    one_over = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2}
    each = config(str(tmp_path), placement={"devices": 2}, policy={"engine": "megatron", "engine_options": one_over})
    assert "2 share each expert" in devices_text(place(each)[0])  # type: ignore[arg-type]


def test_supervised_fine_tuning_has_the_policy_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = SftConfig.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "data": {"train_files": ["x"], "max_tokens": 10},
            "placement": {"devices": 4},
            "policy": {
                "engine": "fsdp",
                "engine_options": {"fsdp_size": 2},
                "sequences_per_micro_batch_per_device": 2,
                "lora": {"rank": 2},
            },
        }
    )
    plan, _ = place(run)
    batches, _ = plan_sft(run, None)
    assert plan is not None and batches is not None
    (role,) = plan.roles
    assert (role.role, role.copies, role.sizes.shard, role.uses_weights_of) == ("policy", 4, 2, None)
    memory = estimate_sft(run, batches, plan)
    assert memory is not None
    (policy,) = memory
    assert policy.weights == 82752 * 4 // 2  # as above
    assert (
        policy.optimizer == 22 * 2 * 64 * 2 * 3 * 4 // 2
    )  # of the adapter: layers, hidden, rank; gradient and averages
    assert policy.activations == 2 * 10 * 64 * 2 * 17 * 2  # sequences, tokens, hidden, layers, values, bytes
    assert peak(plan, memory).phase == "update"


def test_512_devices_are_planned_at_once_and_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    run = config(
        str(tmp_path),
        placement={"devices": 512, "nodes": 64},
        data={"train_files": ["x"], "prompts_per_step": 256},
        policy={"engine": "fsdp", "sequence_parallel": 4, "engine_options": {"fsdp_size": 64}},
        loss={"kl_coef": 0.1},
    )
    begun = time.process_time()
    plan, problems = place(run)
    batches, wrong = plan_batches(run, None)
    assert plan is not None and batches is not None, [*problems, *wrong]
    memory = estimate(run, batches, plan)
    policy = plan.role("policy")
    assert memory is not None and policy is not None
    groups = {axis: policy.groups(axis) for axis in ("data", "sequence", "shard", "replica")}
    assert time.process_time() - begun < 2.0
    assert {axis: (len(found), len(found[0])) for axis, found in groups.items()} == {
        "data": (4, 128), "sequence": (128, 4), "shard": (8, 64), "replica": (64, 8),
    }  # fmt: skip
    for found in groups.values():
        assert sorted(rank for group in found for rank in group) == list(range(512))
    assert plan.roles[-1].ranks[-1].node == 63 and plan.roles[-1].ranks[-1].local_device == 7
    modules = "posttrain.plan.roles, posttrain.plan.traffic, posttrain.plan.memory, sys"
    code = f"import {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
