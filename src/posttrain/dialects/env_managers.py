"""Launches of forks of verl whose episodes the environment env_manager plays; the script's reader adds our own fields for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.scripts.own_managers import ENVIRONMENT
from posttrain.dialects.trees import NOTHING, value_at
from posttrain.dialects.words import OUR_SECTION
from posttrain.verl_advantages import TRAINER, keys_handed

SETTINGS = f"{OUR_SECTION}.environment.settings"
PENALIZES = "actor_rollout_ref.actor.use_invalid_action_penalty"
COEFFICIENT = "actor_rollout_ref.actor.invalid_action_penalty_coef"
ESTIMATOR = "gigpo"  # of these forks, beside verl's own
_SECTIONS = ("env.", "algorithm.gigpo.")


def plays_managers(keys: Reader) -> bool:
    """Return True for a launch whose program makes environment managers."""
    return value_at(keys.values, f"{OUR_SECTION}.environment.name") == ENVIRONMENT


def own(keys: Reader, key: str, otherwise: Any = None) -> Any:
    """The value of a key that only such forks have."""
    value = value_at(keys.values, key)
    return otherwise if value is NOTHING or value is None else value


def read_by_managers(keys: Reader) -> set[str]:
    """The user's own keys that the environments of such a fork, or the rules about them, read."""
    if not plays_managers(keys):
        return set()
    named = value_at(
        keys.values, f"{OUR_SECTION}.advantage.path"
    )  # of a recipe's trainer; else that of the current folder
    handed = keys_handed(Path(named if isinstance(named, str) else TRAINER))
    found = {each.key for each in keys.own if each.key.startswith(_SECTIONS) or each.key in handed}
    return found | {each.key for each in keys.own if each.key in (PENALIZES, COEFFICIENT)}
