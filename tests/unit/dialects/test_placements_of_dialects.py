"""The same cluster in three dialects: verl's pool, SkyRL's groups, ROLL's device mappings."""

from __future__ import annotations

import pytest

from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.roll import DIALECT as ROLL
from posttrain.dialects.skyrl import DIALECT as SKYRL
from posttrain.dialects.verl import DIALECT as VERL
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place


def roll(*overrides: str) -> LoadedConfig:
    base = (
        "pretrain=m", "response_length=100", "actor_train.data_args.file_name=a.jsonl", "rewards.d.worker_cls=exact_match",
        "adv_estimator=grpo", "num_return_sequences_in_group=8", "actor_train.strategy_args.strategy_name=fsdp2_train",
        "num_gpus_per_node=4",
    )  # fmt: skip
    return read_dialect(ROLL, None, (*base, *overrides))


def plan_of(loaded: LoadedConfig) -> PlacementPlan:
    assert [str(problem) for problem in loaded.problems] == []
    plan, problems = place(loaded.config)
    assert plan is not None, problems
    return plan


def test_verls_pool_holds_all_roles() -> None:
    loaded = read_dialect(
        VERL,
        None,
        (
            "data.train_files=a.parquet", "actor_rollout_ref.model.path=m", "trainer.nnodes=2", "trainer.n_gpus_per_node=4",
            "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "actor_rollout_ref.model.use_remove_padding=True",
            "+actor_rollout_ref.actor.fsdp_config.fsdp_size=4", "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        ),
    )  # fmt: skip
    plan = plan_of(loaded)
    assert (plan.nodes, plan.devices, plan.runtime) == (2, 8, "ray")
    assert len(plan.pools) == 1 and {"rollout", "policy"} <= set(plan.pools[0].roles)
    policy, rollout = plan.role("policy"), plan.role("rollout")
    assert policy is not None and rollout is not None
    assert (policy.copies, policy.sizes.sequence, policy.sizes.shard) == (4, 2, 4)
    assert (rollout.copies, rollout.sizes.tensor, rollout.rests) == (4, 2, ("weights", "cache"))


@pytest.mark.parametrize("together", [True, False])
def test_skyrls_groups(together: bool) -> None:
    loaded = read_dialect(
        SKYRL,
        None,
        (
            "data.train_data=[a.parquet]", "trainer.policy.model.path=m", f"trainer.placement.colocate_all={together}",
            "trainer.placement.policy_num_gpus_per_node=2", "trainer.placement.ref_num_gpus_per_node=2",
            "generator.num_inference_engines=1", "generator.inference_engine_tensor_parallel_size=2",
            "generator.backend=vllm", "environment.env_class=gsm8k",
        ),
    )  # fmt: skip
    plan = plan_of(loaded)
    placed = {role.role: role.devices for role in plan.roles}
    assert placed["policy"] == placed["reference"] == (0, 1)  # colocate_policy_ref
    assert placed["rollout"] == ((0, 1) if together else (2, 3))


def test_skyrls_engines_are_copies_of_our_sampler_too() -> None:
    """3 engines of 1 device beside the policy's 2; an unwritten tensor size (SkyRL's 4) is not ours. Written: 3 x 2 = 6."""
    words = (
        "data.train_data=[a.parquet]", "trainer.policy.model.path=m", "trainer.placement.colocate_all=false",
        "trainer.placement.policy_num_gpus_per_node=2", "trainer.placement.ref_num_gpus_per_node=2",
        "generator.num_inference_engines=3", "generator.backend=native", "environment.env_class=gsm8k",
    )  # fmt: skip
    for more, last in ((), 4), (("generator.inference_engine_tensor_parallel_size=2",), 7):
        plan = plan_of(read_dialect(SKYRL, None, (*words, *more)))
        rollout = plan.role("rollout")
        assert rollout is not None and rollout.devices == tuple(range(2, last + 1)) and rollout.sizes.tensor == 1
        assert rollout.copies == last - 1 and plan.devices == last + 1


@pytest.mark.parametrize(
    ("section", "scorer"),
    [
        ("reward_model", ("reward_model.model.path=r", "reward_model.micro_batch_size_per_gpu=1")),
        ("reward.reward_model", ("+reward.reward_model.model_path=r",)),
    ],
)
def test_verls_pools_beside_the_trainers(section: str, scorer: tuple[str, ...]) -> None:
    """2 devices train, 1 x 2 sample, 1 x 1 scores: 0-1, 3-4 after the reward model's 2."""
    words = (
        "data.train_files=a.parquet", "actor_rollout_ref.model.path=m", "trainer.nnodes=1", "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.name=native", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "+actor_rollout_ref.rollout.nnodes=1", "+actor_rollout_ref.rollout.n_gpus_per_node=2",
        f"++{section}.enable=True", f"+{section}.enable_resource_pool=True", f"+{section}.nnodes=1", *scorer,
    )  # fmt: skip
    plan = plan_of(read_dialect(VERL, None, (*words, f"+{section}.n_gpus_per_node=1")))
    placed = {role.role: role.devices for role in plan.roles}
    assert placed == {"rollout": (3, 4), "reward model": (2,), "policy": (0, 1)}
    assert (plan.nodes, plan.devices) == (1, 5)
    (problem,) = read_dialect(VERL, None, (*words, f"+{section}.n_gpus_per_node=0")).problems
    assert problem.what == f"{section} has devices of its own, and {section}.n_gpus_per_node is 0"
    # beside a sampler's pool a reward model without one is on the trainer's devices
    beside = [word for word in words if "enable_resource_pool" not in word]
    plan = plan_of(read_dialect(VERL, None, (*beside, f"+{section}.n_gpus_per_node=1")))
    placed = {role.role: role.devices for role in plan.roles}
    assert placed == {"rollout": (2, 3), "reward model": (0, 1), "policy": (0, 1)}


def test_rolls_mappings_apart() -> None:
    plan = plan_of(
        roll("actor_train.device_mapping='list(range(0,4))'", "actor_infer.device_mapping='list(range(4,8))'",
             "reference.device_mapping='list(range(0,4))'", "actor_infer.num_gpus_per_worker=2",
             "actor_infer.strategy_args.strategy_name=sglang")
    )  # fmt: skip
    rollout = plan.role("rollout")
    assert rollout is not None and plan.nodes == 2 and rollout.copies == 2
    assert [(rank.node, rank.local_device) for rank in rollout.ranks] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_rolls_fsdp_size_of_1_is_all_of_them() -> None:
    size = "actor_train.strategy_args.strategy_config.fsdp_size"
    for written, shard in ((1, 4), (2, 2)):
        plan = plan_of(
            roll("actor_train.device_mapping=[0,1,2,3]", "actor_infer.device_mapping=[0,1,2,3]", f"{size}={written}")
        )
        policy = plan.role("policy")
        assert policy is not None and policy.sizes.shard == shard


def test_a_critic_on_the_cpu_beside_devices() -> None:
    mappings = ("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0,1]")
    (problem,) = roll(*mappings, "adv_estimator=gae").problems
    assert problem.what.startswith("critic has no device_mapping, and ")
    assert problem.what.endswith("has one: a CPU worker cannot train beside devices")
    assert problem.fix == "use critic.device_mapping='list(range(0,2))'"


def test_roles_that_cannot_take_turns_are_told() -> None:
    loaded = roll(
        "actor_train.device_mapping=[0,1,2,3]", "actor_infer.device_mapping=[2,3]", "async_generation_ratio=1",
        "generate_opt_level=1",
    )  # fmt: skip
    assert any(
        text.startswith("actor_train and actor_infer are both on devices 2, 3: with async_generation_ratio=1")
        for text in loaded.warnings
    )


def test_samplers_leave_the_policys_devices_to_training_where_they_have_others() -> None:
    loaded = roll(
        "actor_train.device_mapping=[0,1,2,3]", "actor_infer.device_mapping='list(range(0,8))'", "async_generation_ratio=1",
        "generate_opt_level=1",
    )  # fmt: skip
    assert loaded.problems == ()
    assert (loaded.config.policy.devices, loaded.config.rollout.devices) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert any("actor_infer samples on devices 4, 5, 6, 7, and leaves 0, 1, 2, 3" in text for text in loaded.warnings)
    together = roll("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0,1,2,3]")
    assert together.config.rollout.devices is None  # in turns with the policy
