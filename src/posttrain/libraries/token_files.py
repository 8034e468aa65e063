"""Vocabularies of tokenizers, as their files hold them: token -> id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FIX = "use a teacher of the student's family, with the same tokenizer"


def vocabulary(folder: Path) -> dict[str, int] | None:
    """Read the vocabulary of a tokenizer.json; None without a readable one."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed = tokenizer["model"]["vocab"]
        found = dict(listed) if isinstance(listed, dict) else {token: place for place, (token, _) in enumerate(listed)}
        return found | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str | None:
    """The first difference that matters to a student: a token that the teacher lacks, or knows by another id. None: there is
    none; tokens that only the teacher has do not matter."""
    if student == teacher:
        return None
    wrong = [token for token, place in student.items() if teacher.get(token) != place]
    if not wrong:
        return None
    first = min(wrong, key=lambda token: student[token])
    there = teacher.get(first)
    meaning = "unknown to the teacher" if there is None else f"token {there} of the teacher"
    return (
        f"their tokenizers differ in {len(wrong)} of {len(student)} tokens, such as {first!r}, which is token "
        f"{student[first]} of the student and {meaning}"
    )
