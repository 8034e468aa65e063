"""ROLL's pipelines that are no reinforcement learning, by the keys that only they have."""

from __future__ import annotations

from posttrain.dialects.reader import Reader

_MARKS = {
    "distillation": ("teacher_pretrain", "kd_objective", "distill_loss_weight", "sft_train"),
}
_OF_DIFFUSION = {
    "actor_train.strategy_args.strategy_name": "diffusion_deepspeed_train",
    "actor_train.model_args.model_type": "diffusion_module",
}
_FIX = "run posttrain train with one of an RLVR or agentic pipeline"


def stops_at_another_pipeline(keys: Reader) -> bool:
    """Report a configuration of another pipeline as such, once; nothing else in it is worth a word."""
    for key, word in _OF_DIFFUSION.items():
        if keys[key] == word:
            keys.slips.clear()
            keys.problem("this is a configuration of reward feedback learning of a diffusion model, which is planned", key=key,
                         fix=_FIX)  # fmt: skip
            return True
    for pipeline, marks in _MARKS.items():
        mark = next((key for key in marks if keys.written(key)), None)
        if mark is not None:
            keys.slips.clear()
            keys.problem(f"this is a configuration of {pipeline} from texts", key=mark,
                         fix="run posttrain sft with it")  # fmt: skip
            return True
    return False
