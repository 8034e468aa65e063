"""Checks of the folders of teachers: models, and tokenizers like the student's. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from posttrain.config import TrainingConfig
from posttrain.errors import Problem
from posttrain.libraries.token_files import FIX, difference, vocabulary
from posttrain.plan.model_files import check_model


def check_teachers(config: TrainingConfig) -> list[Problem]:
    """Check the folders of teachers, and that their tokenizers are the student's."""
    problems: list[Problem] = []
    for name, teacher in config.distillation.teachers.items():
        if teacher.path is not None:
            problems += check_model(teacher.path, f"distillation.teachers.{name}.path", tokenizer=True)
    return problems or list(_same_tokens(config))


def _same_tokens(config: TrainingConfig) -> Iterator[Problem]:
    """Compare tokenizer files; those without a tokenizer.json, and those on the hub, are compared when they are loaded."""
    ours = None
    for name, teacher in config.distillation.teachers.items():
        if teacher.path is None or not Path(teacher.path).expanduser().is_dir():
            continue
        ours = ours or vocabulary(Path(config.model.tokenizer_path or config.model.path).expanduser())
        theirs = vocabulary(Path(teacher.path).expanduser())
        if ours is not None and theirs is not None and (reason := difference(ours, theirs)):
            what = f"the teacher cannot grade the student's tokens: {reason}"
            yield Problem(what, fix=FIX, field=f"distillation.teachers.{name}.path")
