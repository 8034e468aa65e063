"""Every key of ROLL: the state of mid-2025, which its guide describes, and what 2026 has besides. Where both know a key, it
means what it means in 2026; names that were dropped since go on working."""

from __future__ import annotations

from posttrain.dialects.ledger import Key, Ledger
from posttrain.dialects.roll.keys import agentic, algorithm, other_pipelines, pipeline, rewards, roles, sft
from posttrain.dialects.roll.keys.worker import LATEST

_SECTIONS = (row for section in (pipeline, algorithm, rewards, agentic, other_pipelines, roles) for row in section.ROWS)
_ROWS: dict[str, Key] = {}
for _row in _SECTIONS:
    _ROWS.setdefault(_row.name, _row)  # a section's own keys stand before those that all workers have

# One dialect: a file of either year is read with all keys; `since`, `until` and `earlier` tell which year had what.
LEDGER = Ledger(dialect="roll", version=LATEST, rows=(*_ROWS.values(), *sft.ROWS))
