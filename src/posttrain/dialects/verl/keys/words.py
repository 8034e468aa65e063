"""What keys wait for, in the same words everywhere; and the sections whose keys begin alike."""

from __future__ import annotations

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
FREEZE_ROUTER = f"{MODEL}.override_config.moe_config.freeze_moe_router"

CUSTOM_DATA = "dataset classes of your own"
MULTI_TURN = "multi-turn rollouts with tools and environments"
TRACES = "traces of conversations and of servers"
OWN_PROFILER = "torch's own profiler records, as posttrain.profiling.* says"
PRECISION = "one precision for all models: that of actor_rollout_ref.actor.fsdp_config"
ALWAYS_FUSED = "log-probs and entropy are always computed in chunks, without keeping the logits"
ALWAYS_PACKED = (
    "sequences are packed without padding, which gives the same numbers; posttrain.model.padded=true pads them"
)
