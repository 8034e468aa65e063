"""SkyRL's trainer, in its dialect of June 2025, with the keys that came later."""

from __future__ import annotations

from posttrain.dialects.reader import Dialect
from posttrain.dialects.skyrl.ledger import LEDGER
from posttrain.dialects.skyrl.rules import rules
from posttrain.dialects.skyrl.rules.sft import sft_rules

# What a defaults list may name without a file beside it: ppo_base_config.yaml, deepspeed_config/{train,eval}.yaml and
# skyrl_gym_config/default.yaml. They hold the defaults of the ledger, which lie below everything in any case.
SHIPPED_FILES = ("ppo_base_config", "train", "eval", "default")

DIALECT = Dialect(
    name="skyrl", ledger=LEDGER, rules={"train": rules, "sft": sft_rules}, built_in=dict.fromkeys(SHIPPED_FILES, dict)
)

__all__ = ["DIALECT"]
