"""ROLL's pipelines that are no reinforcement learning, by the keys that only they have."""

from __future__ import annotations

from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import value_at
from posttrain.errors import ConfigError

# The entry that reads it, and the keys that show it.
_MARKS = {
    "distillation from texts": ("sft", ("teacher_pretrain", "kd_objective", "distill_loss_weight", "sft_train")),
    "preference tuning": ("tune", ("chosen_key", "rejected_key", "ipo")),
}
_OF_DIFFUSION = {
    "actor_train.strategy_args.strategy_name": "diffusion_deepspeed_train",
    "actor_train.model_args.model_type": "diffusion_module",
}
_FIX = "run posttrain train with one of an RLVR or agentic pipeline"


def refuse_another_pipeline(keys: Reader) -> None:
    """Raises: ConfigError for a configuration of another pipeline; nothing else in it is worth a word."""
    refuse_diffusion(keys)
    for pipeline, (entry, marks) in _MARKS.items():
        mark = next((key for key in marks if keys.written(key)), None)
        if mark is not None:
            _refuse(keys, mark, pipeline, f"run posttrain {entry} with it")


def refuse_diffusion(keys: Reader) -> None:
    """Raises: ConfigError for ROLL's training of a diffusion model, which few keys tell from its tuning by preferences."""
    for key, word in _OF_DIFFUSION.items():
        if value_at(keys.values, key) == word:
            _refuse(keys, key, "reward feedback learning of a diffusion model, which is planned", _FIX)


def _refuse(keys: Reader, key: str, pipeline: str, fix: str) -> None:
    before = len(keys.problems)
    keys.problem(f"this is a configuration of {pipeline}", key=key, fix=fix)
    raise ConfigError(keys.problems[before:])
