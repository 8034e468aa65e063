"""DeepSpeed's own words: what is handed on, what is said elsewhere, what is refused, and what it takes on each device."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.plan.checks.engines import engine_warnings
from posttrain.plan.engine import Passes, PlacedModel, engine_plan
from posttrain.plan.engines.deepspeed import ZeroSettings, zero_bytes, zero_settings
from posttrain.plan.estimate import role_memory
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.records.batch_plans import BatchPlan

ZERO2: dict[str, Any] = {  # as ROLL's preset says it
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 1e9,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
    },
}
ZERO3_ON_CPU: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
}


def zero(**words: Any) -> dict[str, Any]:
    return {"zero_optimization": words}


def test_a_preset_is_handed_on_with_whole_numbers() -> None:
    settings, problems, told = zero_settings(ZERO2, 8, compute_dtype="bfloat16")
    assert (problems, told) == ([], [])
    assert settings.section(hidden_size=64) == {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 1_000_000_000,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "contiguous_gradients": True,
    }


def test_auto_is_worked_out_before_deepspeed_sees_it() -> None:
    settings, problems, told = zero_settings(ZERO3_ON_CPU, 8)
    assert (problems, told) == ([], [])
    assert settings.section(hidden_size=100) == {
        "stage": 3,
        "sub_group_size": 1_000_000_000,
        "reduce_bucket_size": 10_000,  # 100 x 100
        "stage3_prefetch_bucket_size": 9_000,  # 0.9 x 100 x 100
        "stage3_param_persistence_threshold": 1_000,  # 10 x 100
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }  # and stage3_max_live_parameters is DeepSpeed's own default


def test_skyrls_defaults_are_known_and_ask_for_nothing_else() -> None:
    words = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "sub_group_size": "auto",
            "stage3_max_reuse_distance": "auto",
            "round_robin_gradients": True,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
        },
        "disable_trace_cache": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
        "prescale_gradient": False,
        "offload_after_step": True,
    }
    settings, problems, told = zero_settings(words, 2)
    assert not problems and len(told) == 1 and "offload_after_step has no effect" in told[0]
    assert settings.section(hidden_size=8) == {"stage": 3, "round_robin_gradients": True}
    assert not settings.offload_optimizer and not settings.offload_param and not settings.pin_memory


def test_nothing_written_is_stage_3() -> None:
    assert zero_settings({}, 4) == (ZeroSettings(stage=3), [], [])


def test_stage_1_has_nothing_to_overlap() -> None:
    settings, problems, told = zero_settings(zero(stage=1, overlap_comm=True), 2)
    assert not problems and settings.section(8)["overlap_comm"] is False
    assert told == [
        "policy.engine_options.zero_optimization.overlap_comm has no effect with stage 1: gradients are reduced once per update"
    ]


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (zero(stage=0), "deepspeed: stage must be 1, 2 or 3, not 0", "use 3"),
        (zero(stage="auto"), "stage must be 1, 2 or 3, not 'auto'", "use 3"),
        (zero(stage=True), "stage must be a number, not true", "use 3"),
        (zero(stagee=2), "deepspeed has no option stagee", "stage"),
        ({"zero_optimisation": {}}, "deepspeed has no option zero_optimisation", "zero_optimization"),
        ({"zero_optimization": 2}, "zero_optimization must be a section of key: value lines, not 2", ""),
        ({"fp16": {"enabled": True}}, "float16 needs a loss scale", "use model.compute_dtype=bfloat16"),
        ({"bf16": {"enabled": True, "x": 1}}, "deepspeed has no option x", ""),
        (zero(stage=2, offload_param={"device": "cpu"}), "ZeRO stage 2 has all of them on every device", "stage=3"),
        (zero(offload_optimizer={"device": "nvme"}), "device must be none or cpu, not 'nvme'", "use cpu, or none"),
        (zero(zero_quantized_weights=True), "does not send rounded numbers", "use false"),
        (zero(zero_hpz_partition_size=3), "4 devices do not split into groups of 3", "zero_hpz_partition_size=2"),
        (
            zero(zero_hpz_partition_size="2"),
            "zero_hpz_partition_size must be a whole number, not '2'",
            "use 1 for none",
        ),
        (
            zero(reduce_bucket_size=1.5),
            "reduce_bucket_size must be a whole number or auto, not 1.5",
            "use a whole number, or auto",
        ),
        (zero(reduce_bucket_size="big"), "reduce_bucket_size must be a whole number or auto, not 'big'", "auto"),
        (zero(overlap_comm="yes"), "overlap_comm must be true or false, not 'yes'", ""),
        (
            {"communication_data_type": "fp16"},
            "communication_data_type must be fp32, float32, bf16 or bfloat16",
            "use fp32",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp8"}},
            "grad_accum_dtype must be fp32, float32, bf16 or bfloat16",
            "use fp32",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], what: str, fix: str) -> None:
    _, problems, _ = zero_settings(options, 4)
    (problem,) = problems
    assert what in problem.what and fix in problem.fix
    assert problem.field.startswith("policy.engine_options.")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gradient_clipping": 0.5}, "critic.optimizer.max_grad_norm is the limit"),
        ({"train_batch_size": 64}, "critic.sequences_per_mini_batch is what an update learns from"),
        ({"bf16": {"enabled": True}}, "bf16.enabled=true has no effect: model.compute_dtype=float32 decides"),
        ({"wall_clock_breakdown": True}, "metrics.jsonl has the seconds of every part of a step"),
        ({"offload_after_step": True}, "offload_optimizer.device=cpu keeps"),
        (zero(stage=2, zero_hpz_partition_size=2), "no effect with stage 2: every device has all weights"),
        (zero(stage3_gather_16bit_weights_on_model_save=False), "saved weights are whole"),
    ],
)
def test_what_has_no_effect(options: dict[str, Any], told: str) -> None:
    _, problems, sentences = zero_settings(options, 4, role="critic", compute_dtype="float32")
    assert not problems and len(sentences) == 1 and told in sentences[0]


def test_auto_and_false_ask_for_nothing() -> None:
    words = {"gradient_clipping": "auto", "train_batch_size": "auto", "wall_clock_breakdown": False}
    assert zero_settings(words, 4)[1:] == ([], [])


@pytest.mark.parametrize(
    ("settings", "width", "weights", "optimizer", "host"),
    [
        # 1000 weights on 4 devices. Gradients add up in 4 bytes; masters 4, Adam's averages 8.
        (ZeroSettings(stage=1), 2, 2000, 4000 + 12_000 // 4, 0),
        (ZeroSettings(stage=2), 2, 2000, (4000 + 12_000) // 4, 0),
        (ZeroSettings(stage=3), 2, 500, 4000, 0),
        (ZeroSettings(stage=3), 4, 1000, (4000 + 8000) // 4, 0),  # parts of float32 weights are their own masters
        (ZeroSettings(stage=3, second_partition=2), 2, 500 + 1000, 4000, 0),
        (ZeroSettings(stage=2, offload_optimizer=True), 2, 2000, 0, 4000),
        (ZeroSettings(stage=3, offload_optimizer=True, offload_param=True), 2, 0, 0, 4500),
        (ZeroSettings(stage=2, accumulation_dtype="bfloat16"), 2, 2000, (2000 + 12_000) // 4, 0),
    ],
)
def test_bytes_of_a_device(settings: ZeroSettings, width: int, weights: int, optimizer: int, host: int) -> None:
    found = zero_bytes(settings, parameters=1000, trained=1000, width=width, ranks=4)
    assert (found.weights, found.optimizer, found.host) == (weights, optimizer, host)


def test_a_frozen_model_has_no_optimizer() -> None:
    found = zero_bytes(ZeroSettings(stage=3), parameters=1000, trained=0, width=2, ranks=4)
    assert (found.weights, found.optimizer) == (500, 0)


SHAPE = ModelShape(  # (1000 - 200) / 8 = 100 weights in a layer
    parameters=1000,
    layers=8,
    hidden=4,
    query_width=4,
    key_value_width=2,
    heads=2,
    key_value_heads=1,
    vocabulary=50,
    outer_parameters=200,
)


def run(policy: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    given = {
        "model": {"path": "m"},
        "data": {"train_files": ["a.jsonl"]},
        "rollout": {"max_response_tokens": 8},
        "policy": {"engine": "deepspeed"} | policy,
        "placement": {"devices": 4},
    }
    return RunConfig.model_validate(given | sections)


def placed(config: RunConfig) -> PlacementPlan:
    plan, problems = place(config)
    assert plan is not None, problems
    return plan


def test_a_plan_counts_parts_of_weights_only_where_there_are() -> None:
    for stage, parts in ((1, 1), (2, 1), (3, 4)):
        policy = placed(run({"engine_options": zero(stage=stage)})).role("policy")
        assert policy is not None and (policy.sizes.shard, policy.copies) == (parts, 4)


def test_the_reference_rests_on_the_cpu_in_deepspeeds_words() -> None:
    plan = placed(run({}, loss={"kl_coef": 0.1}, reference={"offload": True}))
    reference = plan.role("reference")
    assert reference is not None
    batches = BatchPlan.__new__(BatchPlan)  # of which a frozen model needs nothing
    memory = role_memory(run({}, loss={"kl_coef": 0.1}, reference={"offload": True}), batches, reference, SHAPE)
    assert (memory.weights, memory.host) == (0, 1000 * 2 // 4)
    assert memory.gathered == (2 * 100 + 200) * 2


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        # 1000 weights of 2 bytes, gradients of 4, 4 devices: 3/4 comes from others. 6 passes, 2 updates, 8 layers and the rest.
        (zero(stage=1), [("reduce gradients", 2 * 3000, 2 * 9), ("gather new weights", 2 * 1500, 2)]),
        (zero(stage=2), [("reduce gradients", 6 * 3000, 6 * 9), ("gather new weights", 2 * 1500, 2)]),
        (zero(stage=3), [("gather weights", 6 * 2 * 1500, 6 * 18), ("reduce gradients", 6 * 3000, 6 * 9)]),
        (
            zero(stage=3, zero_hpz_partition_size=2),  # back from one neighbour: 1/2
            [("gather weights", 6 * (1500 + 1000), 6 * 18), ("reduce gradients", 6 * 3000, 6 * 9)],
        ),
    ],
)
def test_what_is_sent_in_a_step(settings: dict[str, Any], sent: list[tuple[str, int, int]]) -> None:
    config = run({"engine_options": settings})
    policy = placed(config).role("policy")
    assert policy is not None
    model = PlacedModel(config=config, place=policy, shape=SHAPE)
    found = engine_plan("deepspeed").update_traffic(model, Passes(forward=6, tokens=0, updates=2))
    assert [(each.what, each.bytes, each.messages) for each in found] == [
        (f"policy: {what}", size, count) for what, size, count in sent
    ]


def test_settings_of_all_engines_that_deepspeed_has_ways_of_its_own_for() -> None:
    config = run(
        {"optimizer": {"offload": True}, "engine_options": {"gradient_clipping": 1.0}},
        model={"path": "m", "master_dtype": "bfloat16"},
    )
    told = " ".join(engine_warnings(config))
    assert "model.master_dtype=bfloat16 has no effect with deepspeed" in told
    assert "policy.optimizer.offload has no effect with deepspeed" in told
    assert "policy.engine_options.gradient_clipping has no effect" in told
