"""ROLL's pipeline that distils from texts, on top of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.teacher_workers import PATH, SECTION, teacher_values

_BATCH = "training_args.per_device_train_batch_size"
_NAMES = {"js_divergence": "jensen_shannon"}
_SETTINGS = {
    "skewed_forward_kl": ("skew", "skew_lambda"),
    "skewed_reverse_kl": ("skew", "skew_lambda"),
    "adaptive_kl": ("alpha", "adaptive_kl_alpha"),
}
_KEYS = (
    "question_key",
    "answer_key",
    "logits_topk",
    "distill_loss_weight",
    "kd_objective",
    "kd_temperature",
    "teacher_temperature",
    "distill_on_prompt",
    "skew_lambda",
    "adaptive_kl_alpha",
)


def distil_texts(keys: Reader) -> dict[str, Any]:
    """The teacher and the divergence from it; empty without a teacher, for supervised fine-tuning alone."""
    worker = teacher_values(keys, SECTION, keys.section(SECTION), like="sft_train", read=(PATH, _BATCH))
    path = worker.get(PATH) or keys["teacher_pretrain"]
    if not path:
        for key in _KEYS:
            keys.ignore(key, "no teacher is named (teacher_pretrain)")
        return {}
    share, objective = keys["distill_loss_weight"], keys["kd_objective"]
    fields: dict[str, Any] = {"data.response_column": keys["answer_key"], "data.shuffle": True}
    if keys.written("prompt_key"):
        fields["data.query_column"] = keys["question_key"]
    else:
        fields["data.prompt_column"] = keys["question_key"]
    if not keys.written("max_grad_norm"):
        fields["policy.optimizer.max_grad_norm"] = None
    if not 0 <= share <= 1:
        keys.problem(f"distill_loss_weight is {share:g}, and is a share", key="distill_loss_weight", fix="use 0 to 1")
        share = 1.0
    if share == 0:
        keys.warn("distill_loss_weight is 0: the texts alone are learned, and no teacher is loaded")
        return fields
    divergence: dict[str, Any] = {"name": _NAMES.get(objective, objective)}
    setting, read = _SETTINGS.get(objective, ("", ""))
    if read:
        divergence[setting] = keys[read]
        keys.origins[f"distillation.divergence.{setting}"] = read
    for key in sorted({key for _, key in _SETTINGS.values()} - {read}):
        keys.ignore(key, f"kd_objective={objective} does not read it")
    teacher: dict[str, Any] = {"path": path}
    if _BATCH in worker:
        teacher["sequences_per_micro_batch_per_device"] = worker[_BATCH]
        keys.origins["distillation.teachers.teacher.sequences_per_micro_batch_per_device"] = f"{SECTION}.{_BATCH}"
    return fields | {
        "distillation.teachers": {"teacher": teacher},
        "distillation.divergence": divergence,
        "distillation.top_k": keys["logits_topk"] or None,
        "distillation.top_k_rest": "renormalize",
        "distillation.temperature": keys["kd_temperature"],
        "distillation.teacher_temperature": keys["teacher_temperature"],
        "distillation.coef": share,
        "distillation.text_coef": round(1 - share, 12),
        "distillation.on_prompts": keys["distill_on_prompt"],
    }
