"""Bytes and messages of a step, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.config import RunConfig, SftConfig
from posttrain.plan.batch import plan_batches
from posttrain.plan.experts import ExpertLayers
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.roles import place
from posttrain.plan.sft import plan_sft
from posttrain.plan.step_traffic import sft_traffic, step_traffic

SHAPE = ModelShape(
    parameters=1000, layers=4, hidden=8, heads=8, key_value_heads=2, query_width=8, key_value_width=2, vocabulary=16,
    outer_parameters=200,
)  # fmt: skip


def traffic(shape: ModelShape = SHAPE, **sections: Any) -> dict[str, tuple[int, int]]:
    values = {
        "model": {"path": "x", "compute_dtype": "bfloat16"},
        "data": {"train_files": ["x"], "prompts_per_step": 4, "max_prompt_tokens": 6},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4, "weight_bucket_mib": 1},
        **sections,
    }
    config = RunConfig.model_validate(values)
    plan, problems = place(config)
    batches, wrong = plan_batches(config, None)
    assert plan is not None and batches is not None, [*problems, *wrong]
    return {each.what: (each.bytes, each.messages) for each in step_traffic(config, batches, plan, shape)}


def test_one_device_sends_nothing() -> None:
    assert traffic() == {}


def test_hybrid_sharding() -> None:
    # 8 devices, parts over 4, twice. One update of 16 sequences, 2 on each device in micro-batches of 1: 2 passes.
    found = traffic(
        placement={"devices": 8},
        policy={"engine": "fsdp", "engine_options": {"fsdp_size": 4}, "sequences_per_micro_batch_per_device": 1},
    )
    # Each pass gathers 3/4 of 1000 bfloat16 weights twice, in 4 layers + the rest.
    assert found["policy: gather weights"] == (2 * 2 * 1500, 2 * 2 * 5)
    # And reduces 3/4 of 1000 float32 gradients in the group, then 2 x 1/2 of a quarter of them between the two groups.
    assert found["policy: reduce gradients"] == (2 * (3000 + 1000), 2 * 2 * 5)
    # The sampler of a device gets 2000 bytes, of which it holds a quarter; one bucket.
    assert found["weights to the sampler"] == (1500, 1)
    # 2 sequences of 10 tokens, whose ids stay with the workers: 625 bytes each, and 4 of text for a token.
    assert found["driver"] == (2 * (625 + 10 * 4), 2)
    assert set(found) == {"policy: gather weights", "policy: reduce gradients", "weights to the sampler", "driver"}


def test_a_driver_whose_stages_read_tokens_handles_each_of_them() -> None:
    """Weights of a correction are one number per token: 25 bytes for each of 2 x 10. A KL in the reward and generalised
    advantages are computed where the tokens are: 625 bytes and 10 x 4 of text for each of 2 sequences."""
    reward = {"terms": [{"name": "math"}], "kl": {"coef": 0.1}}
    policy = {"engine": "fsdp", "sequences_per_micro_batch_per_device": 1}
    corrected = traffic(
        placement={"devices": 8}, policy=policy, reward=reward, loss={"rollout_correction": {"weights": "token"}}
    )
    assert corrected["driver"] == (2 * 10 * 25, 2)
    critic = {"engine": "fsdp", "sequences_per_micro_batch_per_device": 1}
    found = traffic(placement={"devices": 8}, policy=policy, reward=reward, critic=critic, advantage={"name": "gae"})
    assert found["driver"] == (2 * (625 + 10 * 4), 2)


def test_an_adapter_travels_alone_to_who_has_the_base() -> None:
    """Rank 1 on 4 layers of 8 hidden units: 22 x 4 x 8 = 704 weights, 1408 bytes in bfloat16; the whole model has 2000."""

    def sent(**rollout: Any) -> tuple[int, int]:
        settings = {"samples_per_prompt": 4, "max_response_tokens": 4, "weight_bucket_mib": 1, "devices": [2, 3]}
        found = traffic(
            placement={"devices": 4},
            policy={"engine": "fsdp", "devices": [0, 1], "lora": {"rank": 1}},
            rollout=settings | rollout,
        )
        return found["weights to the sampler"]

    assert sent() == sent(engine="vllm") == (1408, 1)
    assert sent(engine="sglang") == sent(engine="vllm", weight_sync="collective") == (2000, 1)


def test_gathered_until_the_backward_pass_is_gathered_once() -> None:
    found = traffic(
        placement={"devices": 2}, policy={"engine": "fsdp", "engine_options": {"reshard_after_forward": False}}
    )
    assert found["policy: gather weights"] == (1000, 5)  # one pass: 8 sequences; 1/2 of 2000 bytes


def test_a_shared_sequence() -> None:
    # 4 devices share every sequence: one copy, 16 sequences of 10 tokens, all in one pass.
    found = traffic(
        placement={"devices": 4},
        policy={"engine": "fsdp", "sequence_parallel": 4, "sequences_per_micro_batch_per_device": 16},
        loss={"kl_coef": 0.1},
    )
    # 40 tokens a device; queries and outputs 2 x 8 wide, keys and values 2 x 2, each key/value head for two devices: 24 values
    # of 2 bytes, 3/4 of them for others, in 4 layers: 40 x 24 x 2 x 4 x 3/4 = 5760. Forward and backward.
    assert found["policy: share sequences"] == (2 * 5760, 2 * 2 * 4)
    assert found["reference log-probs: share sequences"] == (5760, 2 * 4)


def test_megatron() -> None:
    # 8 devices: tensor 2 x pipeline 2, two copies. 8 sequences of 10 tokens for each, in micro-batches of 4: 2 passes.
    found = traffic(
        placement={"devices": 8},
        policy={
            "engine": "megatron",
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "sequences_per_micro_batch_per_device": 4,
        },
    )
    # 80 tokens x 8 wide x 2 bytes = 1280. Two sums (twice half of it) in 2 layers, forward and backward.
    assert found["policy: share matrices"] == (2 * 2 * 2 * 1280, 2 * 2 * 2 * 2)
    assert found["policy: share layers"] == (2 * 1280, 2 * 2)
    # A quarter of the weights, float32, added up over 2 copies: 2 x 1/2 x 1000; 6 weights in 2 layers, and 3.
    assert found["policy: reduce gradients"] == (1000, 15)
    assert "policy: share sequences" not in found


def test_virtual_stages_send_more_often() -> None:
    found = traffic(
        placement={"devices": 2},
        policy={
            "engine": "megatron",
            "pipeline_parallel": 2,
            "sequences_per_micro_batch_per_device": 8,
            "engine_options": {"virtual_pipeline_model_parallel_size": 2},
        },
        loss={"kl_coef": 0.1},
    )
    # 160 tokens x 8 wide x 2 bytes = 2560 for each of two virtual stages; forward and backward, in 2 passes. The reference
    # scores forward only, all at once.
    assert found["policy: share layers"] == (2 * 2 * 2560, 2 * 2 * 2)
    assert found["reference log-probs: share layers"] == (2 * 2560, 2)


def test_megatron_over_a_sequence() -> None:
    found = traffic(
        placement={"devices": 2},
        policy={"engine": "megatron", "sequence_parallel": 2, "sequences_per_micro_batch_per_device": 16},
        loss={"kl_coef": 0.1},
    )
    # 16 sequences of 10 tokens, half of them here: 80 x (2 x 8 + 2 x 2) x 2 bytes x 1/2 in 4 layers; the weights' gradients too.
    assert found["policy: share sequences"] == (2 * 6400, 2 * 2 * 4)
    assert found["reference log-probs: share sequences"] == (6400, 2 * 4)
    assert found["policy: reduce gradients"] == (4000, 27)


def test_megatron_with_experts() -> None:
    # 4 layers x 4 experts x 3 x 8 x 1 = 384 of the 1000 weights are in experts, two of which a token meets.
    experts = ExpertLayers(experts=4, chosen=2, width=1, shared_width=0, normalised=True, layers=(True,) * 4)
    mixed = replace(SHAPE, experts=experts)
    policy = {"engine": "megatron", "tensor_parallel": 2, "sequences_per_micro_batch_per_device": 4}
    over = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    found = traffic(mixed, placement={"devices": 4}, policy=policy | {"engine_options": over})
    # 80 tokens x 8 wide x 2 bytes = 1280, in 2 passes. One sum in a layer, of attention; an MLP of experts has none.
    assert found["policy: share matrices"] == (2 * 4 * 1280, 2 * 4 * 2)
    # Half of the tokens are here, each for two experts, half of which are elsewhere: 640 x 2 / 2, there and back.
    assert found["policy: tokens to experts"] == (2 * 4 * 2 * 640, 2 * 4 * 2 * 2)
    # float32: half of 616 over 2 copies, 2 x 1/2 x 308 x 4; half of 384 over the 2 that have the same experts, 192 x 4.
    # 5 weights in 4 layers, and 3; 2 weights of experts in 4 layers.
    assert found["policy: reduce gradients"] == (1232 + 768, 23 + 8)
    # Two share an expert: each gathers what came for the other, too. All four have different parts of the experts.
    found = traffic(
        mixed, placement={"devices": 4}, policy=policy | {"engine_options": {"expert_model_parallel_size": 2}}
    )
    assert found["policy: tokens to experts"] == (2 * 4 * 2 * (640 + 1280), 2 * 2 * 4 * 2 * 2)
    assert found["policy: reduce gradients"] == (1232, 23)
    # Averages in two halves: of the rest and, above, of experts.
    assert "policy: gather new weights" not in found
    shared = policy | {"engine_options": over | {"use_distributed_optimizer": True}}
    found = traffic(mixed, placement={"devices": 4}, policy=shared)
    assert found["policy: gather new weights"] == (616 + 384, 2)
    over |= {"moe_token_dispatcher_type": "allgather"}
    found = traffic(mixed, placement={"devices": 4}, policy=policy | {"engine_options": over})
    assert found["policy: tokens to experts"] == (2 * 4 * 2 * 640, 2 * 4 * 2 * 2)  # the other's 40 tokens, once each


def test_a_sampler_over_two_devices() -> None:
    found = traffic(
        placement={"devices": 2},
        policy={"engine": "fsdp"},
        rollout={"engine": "vllm", "tensor_parallel": 2, "samples_per_prompt": 4, "max_response_tokens": 4},
    )
    # 16 responses of 4 tokens and 4 prompts of 6: 88 tokens, 2 sums in 4 layers, each 2 x 1/2 of 8 values of 2 bytes.
    assert found["sampling: sum over tensor-parallel devices"] == (88 * 2 * 4 * 16, 2 * 4 * 4)


def test_supervised_fine_tuning_sends_an_update() -> None:
    # 4 devices, pairs share sequences of 10 tokens, parts over all. 8 sequences, 4 for each of 2 copies, 2 at a time: 2 passes.
    config = SftConfig.model_validate(
        {
            "model": {"path": "x", "compute_dtype": "bfloat16"},
            "data": {"train_files": ["x"], "sequences_per_step": 8, "max_tokens": 10},
            "placement": {"devices": 4},
            "policy": {"engine": "fsdp", "sequence_parallel": 2, "sequences_per_micro_batch_per_device": 2},
        }
    )
    plan, _ = place(config)
    batches, _ = plan_sft(config, None)
    assert plan is not None and batches is not None
    found = {each.what: (each.bytes, each.messages) for each in sft_traffic(config, batches, plan, SHAPE)}
    assert found == {
        "policy: gather weights": (
            2 * 2 * 1500,
            2 * 2 * 5,
        ),  # 3/4 of 2000 bytes, forward and backward; 4 layers + the rest
        "policy: reduce gradients": (2 * 3000, 2 * 5),
        # 2 passes x 2 directions of 10 tokens: 2 x 10 / 2 on a device; 4 layers, queries and outputs 2 x 8 wide, keys and
        # values 2 x 2, 2 bytes each, half of it for the other device. The device's tokens of the step: 4 x 10 / 2 = 20.
        "policy: share sequences": (2 * 20 * 4 * (2 * 8 + 2 * 2) * 2 // 2, 2 * 4 * 2 * 2),
        "driver": (4 * 10 * 25, 2),
    }
