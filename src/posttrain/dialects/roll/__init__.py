"""ROLL's configuration language."""

from __future__ import annotations

from posttrain.dialects.reader import Dialect
from posttrain.dialects.roll.ledger import LEDGER
from posttrain.dialects.roll.presets import PRESETS
from posttrain.dialects.roll.rules import rules
from posttrain.dialects.roll.rules.dpo import dpo_rules
from posttrain.dialects.roll.rules.sft import sft_rules
from posttrain.dialects.roll.students import as_actors

# ROLL's defaults stand in its classes, which see a file after its references are resolved.
DIALECT = Dialect(
    name="roll",
    ledger=LEDGER,
    rules={"train": rules, "sft": sft_rules, "tune": dpo_rules},
    unknown_keys="warn",
    built_in=PRESETS,
    refers_to_defaults=False,
    renamed=as_actors,
)
