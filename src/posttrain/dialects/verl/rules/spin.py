"""verl's recipe spin: a trainer of its own that learns by DPO from pairs of a step's own responses."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, ROLLOUT

BETA = f"{ACTOR}.dpo_beta"
_EVERY = "trainer.ref_update_freq"
_OTHERS = ("algorithm.dpo_loss_type", "algorithm.dpo_label_smoothing", _EVERY)
# Its update reads none of these: one optimizer step on all pairs, and a loss of two sums of log-probs.
_SET = {
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.entropy_coeff": 0.0,
    "algorithm.use_kl_in_reward": False,
}
_UNREAD = ("policy_loss", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode")


def is_spin(keys: Reader) -> bool:
    """Tell whether the recipe is meant: no other trainer of verl reads its key."""
    return keys.ledger.find(BETA) is not None and keys.written(BETA)


def set_update(keys: Reader) -> None:
    """Let the rules that follow read the recipe's update, which takes all pairs of a step at once."""
    mini = f"{ACTOR}.ppo_mini_batch_size"
    for key, value in (_SET | {mini: keys["data.train_batch_size"]}).items():
        if keys[key] != value and keys.written(key):
            keys.ignore(key, f"the recipe spin ({BETA}) makes one update of a step's pairs, with DPO's loss alone")
        keys.put(key, value)


def spin_estimator(keys: Reader) -> dict[str, Any]:
    """DPO's weights of the two responses of each pair, and the reference that follows the policy."""
    if keys[f"{ROLLOUT}.n"] == 1:
        keys.warn(
            f"{ROLLOUT}.n=1: the recipe spin compares neighbours, which are responses to two prompts here, as in verl; "
            f"{ROLLOUT}.n=2 compares two responses to the same prompt"
        )
    every = get(keys, _EVERY, -1)
    if every > 1:
        keys.warn(
            f"{_EVERY}={every}: the reference becomes the policy of the steps {every}, {2 * every} ...; "
            "verl's is one step older"
        )
    return {
        "advantage.name": "online_dpo",
        "advantage.beta": get(keys, BETA, 0.1),
        "advantage.pair_loss": get(keys, _OTHERS[0], "sigmoid"),
        "advantage.label_smoothing": get(keys, _OTHERS[1], 0.0),
        "advantage.equal_rewards": "first",
        "reference.update_every": every if every > 0 else None,
    }


def spin_loss(keys: Reader) -> dict[str, Any]:
    """The policy gradient whose weights are those of the pairs: sums over responses, a mean over them."""
    for name in _UNREAD:
        keys.ignore(f"{ACTOR}.{name}", f"the recipe spin ({BETA}) has a loss of its own, without a ratio")
    fields = {"loss.name": "gpg", "loss.aggregation": "sequence_mean_token_sum"}
    return fields | {"loss.entropy_coef": 0.0, "policy.epochs_per_step": 1}


def without_spin(keys: Reader) -> None:
    """Report the recipe's keys in a run that is none of its own."""
    for key in _OTHERS:
        keys.ignore(key, f"the recipe spin reads it, which {BETA} asks for")
