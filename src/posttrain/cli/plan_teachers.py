"""The teachers of a run, in the text of its plan."""

from __future__ import annotations

import textwrap

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.distillation import OnPolicyDistillationConfig, TeacherConfig
from posttrain.config.reading.validate import show


def reads_policy_loss(config: RunConfig) -> bool:
    """Tell whether the policy loss is learned from; False where the divergence from teachers is the whole loss."""
    return not (config.distillation.alone and config.distillation.enters == "loss")


def teachers_text(config: TrainingConfig) -> str:
    """Describe the teachers, the divergence from them and its part in what is learned."""
    section = config.distillation
    lines = [_teacher(name, teacher) for name, teacher in section.teachers.items()]
    chosen = section.divergence
    numbers = "".join(f", {name} {show(value)}" for name, value in chosen.settings.items())
    where = "sampled tokens" if section.of_sampled_tokens else "the whole vocabulary"
    if section.top_k is not None and not section.of_sampled_tokens:
        where = f"the teacher's top {section.top_k} ({section.top_k_rest})"
    lines.append(f"{chosen.name}{numbers}, over {where}")
    weight = f"{section.coef:g} x " if section.coef != 1 else ""
    if isinstance(section, OnPolicyDistillationConfig):
        place = "taken from advantages" if section.enters == "advantage" else "in the loss"
        lines.append(
            f"{weight}divergence {place}, {'besides rewards' if section.with_rewards else 'instead of rewards'}"
        )
    else:
        text = config.distillation.text_coef if not isinstance(config, RunConfig) else 0.0
        lines.append(f"{weight}divergence" + (f" + {text:g} x -log pi of the text" if text else ""))
    return f"\n{'':<11}".join(line for each in lines for line in textwrap.wrap(each, width=69))


def _teacher(name: str, teacher: TeacherConfig) -> str:
    place = f"in {len(teacher.endpoints)} server{'s' * (len(teacher.endpoints) > 1)}" if teacher.endpoints else ""
    parts = [teacher.path or "", place, f"weight {teacher.coef:g}" if teacher.coef != 1 else ""]
    parts.append(f"for {', '.join(teacher.data_sources)}" if teacher.data_sources else "")
    return f"{name}: " + ", ".join(part for part in parts if part)
