"""DPO, distillation: understood, planned."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, planned

_DPO = "preference tuning (DPO)"
_DISTILL = "distillation"
_OTHERS: tuple[tuple[str, Any, str, str], ...] = (
    ("chosen_key", str, _DPO, "column with the better response"),
    ("rejected_key", str, _DPO, "column with the worse response"),
    ("beta", float, _DPO, "strength of the preference"),
    ("ipo", bool, _DPO, "the IPO loss"),
    ("label_smoothing", float, _DPO, "share of labels taken for wrong"),
    ("student", dict, _DISTILL, "worker of the student"),
    ("question_key", str, _DISTILL, "column with the question"),
    ("answer_key", str, _DISTILL, "column with the answer"),
    ("logits_topk", int, _DISTILL, "logits kept per token"),
    ("distill_loss_weight", float, _DISTILL, "share of the distillation loss"),
    ("kd_objective", str, _DISTILL, "divergence from the teacher"),
    ("kd_temperature", float, _DISTILL, "temperature of the student"),
    ("teacher_temperature", float, _DISTILL, "temperature of the teacher"),
    ("student_pretrain", str, _DISTILL, "model of the student"),
    ("teacher_pretrain", str, _DISTILL, "model of the teacher"),
    ("skew_lambda", float, _DISTILL, "mixture of the skewed divergences"),
    ("adaptive_kl_alpha", float, _DISTILL, "mixture of the adaptive divergence"),
    ("distill_on_prompt", bool, _DISTILL, "learn from prompt tokens too"),
    ("logits_transfer_backend", str, _DISTILL, "how logits travel"),
)

ROWS: tuple[Key, ...] = tuple(planned(name, type, ABSENT, reason, meaning) for name, type, reason, meaning in _OTHERS)
