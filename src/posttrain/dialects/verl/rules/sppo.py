"""verl's recipe sppo: a trainer of its own whose file names no estimator, and two numbers called sppo_eta."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR
from posttrain.dialects.verl.rules.spin import BETA, is_spin, set_update

ETA = "algorithm.sppo_eta"  # of the soft mean of the rewards; the recipe's trainer reads it without a default
_ESTIMATOR = "algorithm.adv_estimator"
_UNREAD = ("policy_loss", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def is_sppo(keys: Reader) -> bool:
    """Tell whether the recipe is meant: no other trainer of verl reads its key."""
    return keys.ledger.find(ETA) is not None and keys.written(ETA)


def set_estimator(keys: Reader) -> None:
    """Let the rules that follow read the estimator of sppo or spin, which has no name in verl."""
    if is_sppo(keys) or is_spin(keys):
        name, does = (
            (f"sppo ({ETA})", "compares rewards with the soft mean of the step")
            if is_sppo(keys)
            else (f"spin ({BETA})", "compares the responses of pairs")
        )
        if keys[_ESTIMATOR] is not None and keys.written(_ESTIMATOR):
            keys.ignore(_ESTIMATOR, f"the recipe {name} {does}")
        keys.put(_ESTIMATOR, "sppo" if is_sppo(keys) else "online_dpo")
        if not is_sppo(keys):
            set_update(keys)
    elif keys[_ESTIMATOR] is None:
        keys.problem(
            f"{_ESTIMATOR} is null, which only the recipes sppo and spin take, and they have {ETA} and {BETA}",
            key=_ESTIMATOR,
            fix=f"use {_ESTIMATOR}=grpo, {ETA}=1.0 for SPPO, or {BETA}=0.1 for SPIN",
        )
        keys.put(_ESTIMATOR, "grpo")


def sppo_loss(keys: Reader) -> dict[str, Any]:
    """The recipe's loss, a mean over responses; its entropy and KL are means over tokens."""
    mode = f"{ACTOR}.loss_agg_mode"
    if get(keys, mode, "token-mean") != "token-mean":
        keys.problem(f"{mode} is {keys[mode]}: the recipe sppo takes token-mean alone", key=mode, fix=f"remove {mode}")
    for name in _UNREAD:
        keys.ignore(f"{ACTOR}.{name}", f"the recipe sppo ({ETA}) has a loss of its own, without a clip")
    return {"loss.name": "sppo", "loss.advantage_scale": get(keys, f"{ACTOR}.sppo_eta", 1.0)} | mean_of_responses(keys)


def mean_of_responses(keys: Reader) -> dict[str, Any]:
    """The aggregation of a loss that is a mean over responses beside an entropy and a KL that are means over tokens."""
    fields = {"loss.aggregation": "sequence_mean_token_mean", "loss.entropy_aggregation": "token_mean"}
    return fields | ({"loss.kl_aggregation": "token_mean"} if keys[f"{ACTOR}.use_kl_loss"] else {})
