"""The sections of verl's configuration whose keys the rules read."""

from __future__ import annotations

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
AGENT = f"{ROLLOUT}.agent"
FREEZE_ROUTER = f"{MODEL}.override_config.moe_config.freeze_moe_router"
