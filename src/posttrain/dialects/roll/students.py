"""Students of on-policy distillation, which are the actors under other names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.config.reading.compose import Composed

# Of the pipeline that distils from texts: its student is what supervised fine-tuning trains.
OF_TEXTS = {"student": "sft_train", "student_pretrain": "pretrain"}
ACTORS = {"student_train": "actor_train", "student_infer": "actor_infer"}

NAMES = ACTORS | OF_TEXTS


def as_actors(composed: Composed) -> Composed:
    """Read the sections student_train and student_infer as actor_train and actor_infer, as ROLL does: where they are written, the
    run is one of distillation alone, whichever launcher reads the file. Places stay those of the user's words."""
    written = [section for section in NAMES if section in composed.values]
    if not written:
        return composed
    values: dict[str, Any] = {
        NAMES.get(key, key): value for key, value in composed.values.items() if key not in _of(written)
    }
    if not OF_TEXTS.keys() & composed.values.keys():
        values.setdefault("is_pure_opd", not composed.values.get("use_opd", False))
    places = {
        _renamed(key): place for key, place in composed.sources.places.items() if key.split(".")[0] not in _of(written)
    }
    return replace(
        composed,
        values=values,
        sources=replace(composed.sources, places=places),
        open=tuple(map(_renamed, composed.open)),
        missing=tuple(map(_renamed, composed.missing)),
        referred=frozenset(map(_renamed, composed.referred)),
        names={NAMES[section]: section for section in written},
    )


def _of(students: list[str]) -> list[str]:
    """The actors that students replace."""
    return [NAMES[student] for student in students]


def _renamed(key: str) -> str:
    section, dot, rest = key.partition(".")
    return f"{NAMES.get(section, section)}{dot}{rest}"
