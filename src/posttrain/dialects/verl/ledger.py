"""The ledger of verl, by section of its configuration."""

from __future__ import annotations

from pathlib import Path

from posttrain.dialects.tables import Tables

TABLES = Tables(
    folder=Path(__file__).parent / "keys",
    dialect="verl",
    version="0.4",
    versions=("0.1", "0.2", "0.4"),
    names=(
        "data",
        "model",
        "actor",
        "ref",
        "rollout",
        "serving",
        "turns",
        "critic",
        "reward",
        "reward_model",
        "algorithm",
        "trainer",
        "loops",
        "distillation",
        "sft",
        "sft_engine",
        "evaluate",
        "generate",
        "translated",
        "released",
    ),
)
LEDGER = TABLES.ledger()
