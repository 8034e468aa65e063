"""The ledger of verl, by section of its configuration."""

from __future__ import annotations

from dataclasses import replace
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
        "prime",
        "spin",
        "gkd",
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
        "engines",
        "newest",
        "code",
    ),
)
# Numbers of forks: Search-R1, PRIME, DeepResearcher
_SAMPLES = "actor_rollout_ref.rollout.n"
WORDS_OF_FORKS = dict.fromkeys((f"{_SAMPLES}_agent", "data.n_samples", "agent_grpo.n"), _SAMPLES)
# legacy_reward_impl.yaml of 0.7 and later
EMPTIED = frozenset(
    {
        "critic.model.tokenizer_path",
        "custom_reward_function.name",
        *(f"sandbox_fusion.{name}" for name in ("max_concurrent", "memory_limit_mb")),
        *(f"reward_model.{name}" for name in ("num_workers", "reward_manager", "reward_loop_source")),
        *(f"reward_model.{name}" for name in ("enable", "enable_resource_pool", "n_gpus_per_node", "nnodes")),
        *(f"reward_model.model.{name}" for name in ("path", "trust_remote_code")),
    }
)
LEDGER = replace(TABLES.ledger(), words_of_forks=WORDS_OF_FORKS, emptied=EMPTIED)
