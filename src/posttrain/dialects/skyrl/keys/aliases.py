"""Keys that a later SkyRL knows under another name: both names mean one setting, and writing both is an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from posttrain.dialects.ledger import Key

_ENGINE = "generator.inference_engine"
_SAME_NAME = (
    "model_dtype",
    "run_engines_locally",
    "backend",
    "weight_sync_backend",
    "weight_transfer_threshold_cuda_ipc_GB",
    "async_engine",
    "vllm_v1_disable_multiproc",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enforce_eager",
    "gpu_memory_utilization",
    "engine_init_kwargs",
    "engine_init_kwargs.**",
    "override_existing_update_group",
    "enable_http_endpoint",
    "http_endpoint_host",
    "http_endpoint_port",
)

# Name of mid-2025 -> its later name. generator.inference_engine.* came in 2026.
LATER_NAMES: dict[str, str] = {
    "trainer.algorithm.ppo_loss_type": "trainer.algorithm.policy_loss_type",
    "trainer.use_sample_packing": "trainer.remove_microbatch_padding",
    "generator.num_inference_engines": f"{_ENGINE}.num_engines",
    **{
        f"generator.inference_engine_{kind}_parallel_size": f"{_ENGINE}.{kind}_parallel_size"
        for kind in ("tensor", "pipeline", "expert", "data")
    },
    "generator.remote_inference_engine_urls": f"{_ENGINE}.remote_urls",
    **{f"generator.{name}": f"{_ENGINE}.{name}" for name in _SAME_NAME},
}


def alias_rows(rows: Iterable[Key]) -> tuple[Key, ...]:
    """A row for every later name, like that of the earlier one but null until someone writes it."""
    by_name = {row.name: row for row in rows}
    return tuple(_alias(by_name[name], later) for name, later in LATER_NAMES.items())


def _alias(row: Key, later: str) -> Key:
    open_ended = row.name.endswith("**")
    return replace(
        row,
        name=later,
        type=row.type if open_ended else row.type | None,
        default=row.default if open_ended else None,
        off=(*row.off, row.default) if row.status == "planned" else row.off,
        by_rule=row.status == "mapped",
        earlier={"2025-08": "regular"} if later.endswith("policy_loss_type") else {},
        since="2025-08" if later.endswith("policy_loss_type") else "later",
        until="",
        note=f"The later name of {row.name}; writing both is an error.",
    )
