"""The files in ROLL's examples/config that its users name in a defaults list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tree = dict[str, Any]


def _deepspeed(name: str, zero: Mapping[str, Any], **more: Any) -> Callable[[], Tree]:
    def preset() -> Tree:
        return {
            name: {
                "train_micro_batch_size_per_gpu": "auto",
                "bf16": {"enabled": True},
                "fp16": {
                    "enabled": False,
                    "loss_scale": 0,
                    "initial_scale_power": 16,
                    "loss_scale_window": 1000,
                    "hysteresis": 2,
                    "min_loss_scale": 1,
                },
                "zero_optimization": dict(zero),
                **more,
            }
        }

    return preset


_ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 1e9,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_ON_CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def _environments() -> Tree:
    """The example environments. Their texts are left out: the games here have instructions of their own."""
    kinds = {
        "SimpleSokoban": ("sokoban", {"dim_room": [6, 6], "num_boxes": 1, "format_penalty": -0.15}),
        "LargerSokoban": (
            "sokoban",
            {"dim_room": [10, 10], "num_boxes": 2, "search_depth": 10, "format_penalty": -0.15},
        ),
        "SokobanDifferentGridVocab": (
            "sokoban",
            {
                "dim_room": [6, 6],
                "num_boxes": 1,
                "format_penalty": -0.15,
                "grid_lookup": {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"},
            },
        ),
        "FrozenLake": ("frozen_lake", {"size": 4, "is_slippery": False, "format_penalty": -0.01}),
        "FrozenLakeThink": (
            "frozen_lake",
            {
                "size": 4,
                "is_slippery": False,
                "format_penalty": -0.01,
                "action_pattern": r"<think>(.*?)</think>\s*<answer>(.*?)</answer>",
            },
        ),
        "WebShopEnv": ("webshop", {"format_penalty": -0.05}),
    }
    return {
        "custom_env": {
            name: {"env_type": kind, "max_steps": 10, "max_tokens_per_step": 128, "env_config": config}
            for name, (kind, config) in kinds.items()
        }
    }


PRESETS: dict[str, Callable[[], Tree]] = {
    "deepspeed_zero": _deepspeed("deepspeed_zero", {"stage": 0}, checkpoint={"tag_validation": "IGNORE"}),
    "deepspeed_zero2": _deepspeed("deepspeed_zero2", _ZERO2),
    "deepspeed_zero2_cpuoffload": _deepspeed("deepspeed_zero2_cpuoffload", {**_ZERO2, **_ON_CPU}),
    "deepspeed_zero3": _deepspeed("deepspeed_zero3", _ZERO3),
    "deepspeed_zero3_cpuoffload": _deepspeed("deepspeed_zero3_cpuoffload", {**_ZERO3, **_ON_CPU}),
    "envs": _environments,
    "traj_envs": _environments,
}
