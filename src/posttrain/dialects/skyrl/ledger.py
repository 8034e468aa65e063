"""The ledger of SkyRL: the state of June 2025, its names of August 2025, and what came later and is in use; of its supervised
fine-tuning, which came in 2026, too."""

from __future__ import annotations

from pathlib import Path

from posttrain.dialects.tables import Tables

TABLES = Tables(
    folder=Path(__file__).parent / "keys",
    dialect="skyrl",
    version="2025-06",
    versions=("2025-06", "2025-08"),
    names=(
        "data",
        "placement",
        "trainer",
        "records",
        "models",
        "algorithm",
        "loss",
        "deepspeed",
        "engines",
        "sampling",
        "aliases",
        "later",
        "sft",
    ),
)
LEDGER = TABLES.ledger()
