"""The ledger of ROLL: the state of mid-2025, which its guide describes, and what 2026 has besides. Where both know a key, it
means what it means in 2026; names that were dropped since still work."""

from __future__ import annotations

from pathlib import Path

from posttrain.dialects.tables import Tables

# One dialect: a file of either year is read with all keys; `since`, `until` and `earlier` tell which year had what.
TABLES = Tables(
    folder=Path(__file__).parent / "keys",
    dialect="roll",
    version="2026-08",
    names=("pipeline", "algorithm", "rewards", "agentic", "other_pipelines", "roles", "sft", "dpo"),
)
LEDGER = TABLES.ledger()
