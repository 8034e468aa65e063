"""Keys of trainer.placement and of the training engine: which model stands on which devices."""

from __future__ import annotations

from typing import Literal

from posttrain.dialects.ledger import Key, ignored, mapped

_NO_REWARD_MODEL = "SkyRL has no reward model to place"


def _group(role: str, devices: str) -> tuple[Key, ...]:
    name = {"ref": "reference"}.get(role, role)
    return (
        mapped(
            f"trainer.placement.{role}_num_nodes",
            int,
            1,
            f"{'placement.nodes ' if role == 'policy' else ''}{devices}",
            f"machines of the {name}",
            by_rule=True,
            change="nodes x devices per node = devices",
        ),
        mapped(
            f"trainer.placement.{role}_num_gpus_per_node",
            int,
            4,
            f"{'placement.devices ' if role == 'policy' else ''}{devices}",
            f"devices of the {name} on each machine",
            by_rule=True,
            change="nodes x devices per node = devices; divided by the sequence-parallel size, data-parallel ranks",
            note="4 at this version; later versions of SkyRL default to 1.",
        ),
    )


ROWS: tuple[Key, ...] = (
    mapped(
        "trainer.placement.colocate_all",
        bool,
        True,
        "policy.devices rollout.devices reference.devices critic.devices placement.devices",
        "all models and the sampler share the same devices and take turns",
        by_rule=True,
        change="false: groups of devices side by side, policy first, sampler last",
        note="SkyRL's placement guide ties the sampler's sleeping to run_engines_locally; it goes by this key.",
    ),
    mapped(
        "trainer.placement.colocate_policy_ref",
        bool,
        True,
        "reference.devices",
        "without colocate_all: policy and reference share their devices",
        by_rule=True,
    ),
    ignored(
        "trainer.placement.colocate_critic_reward",
        bool,
        False,
        _NO_REWARD_MODEL,
        "without colocate_all: critic and reward model share their devices",
    ),
    *_group("policy", "policy.devices"),
    *_group("critic", "critic.devices"),
    *_group("ref", "reference.devices"),
    ignored("trainer.placement.reward_num_nodes", int, 1, _NO_REWARD_MODEL, "machines of the reward model"),
    ignored(
        "trainer.placement.reward_num_gpus_per_node",
        int,
        4,
        _NO_REWARD_MODEL,
        "devices of the reward model per machine",
    ),
    mapped(
        "trainer.strategy",
        Literal["fsdp", "fsdp2", "deepspeed", "megatron"],
        "fsdp2",
        "policy.engine critic.engine",
        "training engine",
        by_rule=True,
        change="fsdp, fsdp2: fsdp; on one device: local, with the same numbers",
        note="megatron since September 2025; deepspeed until January 2026.",
    ),
    ignored(
        "trainer.sequence_parallel_backend",
        Literal["ulysses"],
        "ulysses",
        "there is one way",
        "how devices share a sequence",
    ),
)
