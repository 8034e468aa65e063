"""verl's configuration language: ppo_trainer.yaml, sft_trainer.yaml, evaluation.yaml, generation.yaml, and their later forms."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Dialect
from posttrain.dialects.verl.ledger import LEDGER
from posttrain.dialects.verl.rules import rules
from posttrain.dialects.verl.rules.evaluate import evaluate_rules
from posttrain.dialects.verl.rules.generate import generate_rules
from posttrain.dialects.verl.rules.sft import sft_rules
from posttrain.dialects.verl.rules.sft_engine import AUTOMODEL
from posttrain.dialects.verl.strategies import MEGATRON, SHARDED, TORCHTITAN, VEOMNI


def _ppo_trainer() -> dict[str, Any]:
    return LEDGER.of("train").defaults()


def _sft_trainer() -> dict[str, Any]:
    return LEDGER.of("sft").defaults()


def _sft_trainer_engine() -> dict[str, Any]:
    """Return the differences of the file of verl 0.6 and later."""
    tree = _sft_trainer()
    tree["engine"]["strategy"] = SHARDED[0]
    tree["model"]["path"] = "~/models/deepseek-llm-7b-chat"
    tree["data"] |= {"use_dynamic_bsz": True, "val_files": None}
    tree["optim"] |= {"lr": 1e-3, "betas": [0.9, 0.999], "lr_warmup_steps_ratio": 0.0, "lr_scheduler_type": "constant"}
    tree["trainer"] |= {"n_gpus_per_node": 1, "logger": ["console", "wandb"]}
    return tree


def _generation() -> dict[str, Any]:
    return LEDGER.of("generate").defaults()


def _evaluation() -> dict[str, Any]:
    return LEDGER.of("evaluate").defaults()


def _ppo_megatron_trainer() -> dict[str, Any]:
    """Return the differences of verl's Megatron file."""
    tree = _ppo_trainer()
    tree["actor_rollout_ref"]["actor"]["strategy"] = MEGATRON
    tree["actor_rollout_ref"]["model"]["enable_gradient_checkpointing"] = False
    tree["actor_rollout_ref"]["rollout"]["load_format"] = "dummy_megatron"
    tree["critic"]["model"]["enable_gradient_checkpointing"] = False
    return tree


# Files of its folders engine and optim
_ENGINES = (SHARDED[0], MEGATRON, VEOMNI, TORCHTITAN, AUTOMODEL)

DIALECT = Dialect(
    name="verl",
    ledger=LEDGER,
    rules={"train": rules, "sft": sft_rules, "evaluate": evaluate_rules, "generate": generate_rules},
    built_in={
        "ppo_trainer": _ppo_trainer,
        "ppo_megatron_trainer": _ppo_megatron_trainer,
        "sft_trainer": _sft_trainer,
        "sft_trainer_engine": _sft_trainer_engine,
        "generation": _generation,
        "evaluation": _evaluation,
        "legacy_data": lambda: _ppo_trainer()[
            "data"
        ],  # named by ppo_trainer.yaml; forks whose git ignores data/ lack it
    },
    options={
        "sft_trainer_engine": {
            "model": {"hf_model": {}},
            "engine": {name: {"engine": {"strategy": name}} for name in _ENGINES},
            "optim": {name: {"optim": {"lr": 1e-5}} if name == AUTOMODEL else {} for name in _ENGINES},
        }
    },
)
