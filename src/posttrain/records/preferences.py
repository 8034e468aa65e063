"""Rows of a preference dataset, as token ids."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.records.texts import Text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preference:
    """One row: two completions of a prompt, of which the first is better, or one completion that is good or bad."""

    name: str  # such as train.parquet:17
    sides: tuple[Text, ...]  # (chosen, rejected), or (completion,); the prompt's tokens come first and are not learned
    desirable: bool = True  # of a single completion
    margin: float = 0.0  # of a pair: by how much the chosen side is better
    # Of the sides, nats, of the reference; None: not known yet, or not needed
    ref_logps: tuple[float, ...] | None = None
