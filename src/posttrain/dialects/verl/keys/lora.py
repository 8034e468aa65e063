"""Rows of LoRA, which actor and critic have alike."""

from __future__ import annotations

from posttrain.dialects.ledger import ABSENT, Key, mapped


def lora_rows(section: str, role: str) -> tuple[Key, ...]:
    """``section`` (actor_rollout_ref.model, critic.model) of ``role``. The critic's has no exclude_modules."""
    ours = f"{role}.lora"
    of_actor = role == "policy"
    excluded = mapped(
        f"{section}.exclude_modules",
        list[str] | str | None,
        None,
        f"{ours}.exclude_modules",
        "LoRA: modules that get no adapter",
        by_rule=True,
        since="0.4",
    )
    adapter = mapped(
        f"{section}.lora_adapter_path",
        str | None,
        ABSENT,
        f"{ours}.adapter_path",
        "LoRA: adapter to start from",
        by_rule=True,
        since="later",
    )
    return (
        mapped(
            f"{section}.lora_rank",
            int,
            0,
            f"{ours}.rank",
            "LoRA: rank of the adapters; 0 trains all weights",
            by_rule=True,
            since="0.4",
        ),
        mapped(
            f"{section}.lora_alpha",
            int | float,
            16,
            f"{ours}.alpha",
            "LoRA: scale of the adapters, times their rank",
            by_rule=True,
            since="0.4",
        ),
        mapped(
            f"{section}.target_modules",
            list[str] | str,
            "all-linear",
            f"{ours}.target_modules",
            "LoRA: modules that get an adapter",
            by_rule=True,
            since="0.4",
        ),
        *((excluded, adapter) if of_actor else ()),
    )
