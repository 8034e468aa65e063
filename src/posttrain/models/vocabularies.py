"""Comparison of vocabularies: a student learns token by token, so every token must mean the same to its teacher."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from posttrain.errors import ModelError, Problem
from posttrain.libraries.token_files import FIX, difference


def check_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, field: str) -> None:
    """Raises: ModelError when a token of the student's tokenizer is missing in the teacher's, or has another id there."""
    if reason := difference(student.get_vocab(), teacher.get_vocab()):
        what = f"the teacher cannot grade the student's tokens: {reason}"
        raise ModelError(Problem(what, fix=FIX, field=field))
