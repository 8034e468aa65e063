"""The plan's bytes and messages for clusters that nobody has at hand: a dry run, without torch.

    python benchmarks/scaling.py

A step of GRPO with a reference on 1, 8, 64 and 512 devices for models of 0.5B, 7B and 70B parameters. Prints the tables of
docs/scaling.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig
from posttrain.plan.batch import plan_batches
from posttrain.plan.estimate import estimate, peak
from posttrain.plan.heads import head_problems
from posttrain.plan.model_shape import read_shape
from posttrain.plan.placement import PlacementPlan
from posttrain.plan.roles import place
from posttrain.plan.step_traffic import step_traffic
from posttrain.plan.traffic import Traffic

GIB, GB = 1024**3, 10**9
DEVICES = (1, 8, 64, 512)
# The published shapes of Qwen2.5-0.5B, Qwen2.5-7B and Llama-3-70B.
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064,
    },
    "70B": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "vocab_size": 128256,
    },
}  # fmt: skip
SHARED_BY = {
    "0.5B": 1,
    "7B": 1,
    "70B": 8,
}  # devices of a sequence, and of a copy of the sampler, where there are as many


def scaled(folder: Path, model: str, devices: int) -> RunConfig:
    """256 prompts x 8 samples of up to 1024 + 3072 tokens; 4 updates; eight devices on a node."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    shared = min(SHARED_BY[model], devices)
    trained = {"engine": "fsdp" if devices > 1 else "local", "sequence_parallel": shared}
    options = {"fsdp_size": 64} if devices > 64 else {}
    tokens = 4096  # per device and micro-batch: one sequence of full length
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "gradient_checkpointing": True},
            "data": {"train_files": ["prompts.parquet"], "prompts_per_step": 256, "max_prompt_tokens": 1024},
            "rollout": {
                "engine": "vllm",
                "samples_per_prompt": 8,
                "max_response_tokens": 3072,
                "tensor_parallel": shared,
                "engine_options": {"free_cache_engine": True},
            },
            "policy": {
                **trained,
                "engine_options": options,
                "sequences_per_mini_batch": 512,
                "max_tokens_per_micro_batch": tokens,
            },
            "reference": {"engine_options": options, "max_tokens_per_micro_batch": 2 * tokens},
            "loss": {"kl_coef": 0.001},
            "run": {"total_steps": 1},
            "placement": {"devices": devices, "nodes": -(-devices // 8)},
        }
    )


def planned(model: str, devices: int) -> tuple[PlacementPlan, int, int, list[Traffic]]:
    """The plan; bytes on the fullest device and in its node's memory (per device); what a device receives in a step."""
    with tempfile.TemporaryDirectory() as name:
        config = scaled(Path(name), model, devices)
        plan, problems = place(config)
        batches, wrong = plan_batches(config, None)
        assert plan is not None and batches is not None, [*problems, *wrong]
        assert not head_problems(config, plan)
        memory, shape = estimate(config, batches, plan), read_shape(name)
        assert memory is not None and shape is not None
        host = sum(role.host for role in memory)
        return plan, peak(plan, memory).bytes, host, step_traffic(config, batches, plan, shape)


def sizes() -> Iterator[Sequence[str]]:
    for model in MODELS:
        for devices in DEVICES:
            plan, most, _, traffic = planned(model, devices)
            policy, rollout = plan.role("policy"), plan.role("rollout")
            assert policy is not None and rollout is not None
            yield (
                model,
                str(devices),
                f"{policy.sizes.shard} x {len(policy.groups('shard'))}",
                str(policy.sizes.sequence),
                f"{rollout.copies} x {rollout.devices_per_copy}",
                f"{most / GIB:,.1f}",
                f"{sum(each.bytes for each in traffic) / GB:,.1f}",
                f"{sum(each.messages for each in traffic):,}",
            )


def purposes() -> Iterator[Sequence[str]]:
    """What the messages of the largest are for."""
    for each in planned("70B", 512)[3]:
        yield each.what, f"{each.bytes / GB:,.2f}", f"{each.messages:,}"


def table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    for row in [header, ["---"] * len(header), *rows]:
        print("| " + " | ".join(row) + " |")
    print()


def main() -> None:
    table(
        (
            "model", "devices", "shard x replicas", "sequence", "samplers x devices", "GiB per device", "GB received",
            "messages",
        ),
        sizes(),
    )  # fmt: skip
    table(("70B on 512 devices, per device and step", "GB received", "messages"), purposes())


if __name__ == "__main__":
    main()
