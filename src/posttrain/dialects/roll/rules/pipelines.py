"""ROLL's pipelines that are no reinforcement learning, by the keys that only they have."""

from __future__ import annotations

from posttrain.dialects.reading import Reader

_MARKS = {
    "preference tuning (DPO)": ("chosen_key", "rejected_key", "ipo"),
    "distillation": ("student", "student_pretrain", "kd_objective"),
    "on-policy distillation": ("student_train", "student_infer"),
}


def stops_at_another_pipeline(keys: Reader) -> bool:
    """Report a configuration of another pipeline as such, once; nothing else in it is worth a word."""
    for pipeline, marks in _MARKS.items():
        mark = next((key for key in marks if keys.written(key)), None)
        if mark is not None:
            keys.problem(f"this is a configuration of {pipeline}, which is planned", key=mark,
                         fix="run posttrain train with one of an RLVR or agentic pipeline")  # fmt: skip
            return True
    return False
