"""verl's recipe gkd: a trainer of its own that learns from the most likely tokens of a teacher in servers of its own."""

from __future__ import annotations

from typing import Any

from posttrain.data.columns import ALL
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, ROLLOUT

_TEACHER = "actor_rollout_ref.teacher"
_MICRO, _BUDGET = f"{ACTOR}.micro_batch_size", f"{ACTOR}.max_token_len"
_SCHEDULER = "trainer.scheduler"
_LOSS = f"{ACTOR}.distill_loss"
# Its losses: ours, and how the tokens outside of the list count.
_LOSSES = {"kl": ("forward_kl", "drop"), "rkl": ("reverse_kl", "renormalize"), "jsd": ("jensen_shannon", "bucket")}
_LISTED = 256  # --n-logprobs of the recipe's start_server.sh
# What its trainer does not read: it scores nothing, compares no old log-probs and does not validate.
_WITHOUT = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.ppo_micro_batch_size": None,
    f"{ROLLOUT}.log_prob_micro_batch_size": None,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": False,
}
# Its rows need no answer: all further columns are taken as they are.
_WITHOUT_REWARDS = {"validation.every_steps": None, "validation.before_training": False, "data.extra_columns": [ALL]}


def is_gkd(keys: Reader) -> bool:
    """Tell whether the recipe is meant: no other trainer of verl reads its section."""
    return keys.ledger.find(f"{_TEACHER}.server_ip") is not None and keys.written(_TEACHER)


def set_sizes(keys: Reader) -> None:
    """Let the rules that follow read the recipe's sizes: one update of a step, and micro-batches by keys of its own."""
    if not is_gkd(keys):
        for key in (_MICRO, _BUDGET, _SCHEDULER):
            keys.ignore(key, f"the recipe gkd reads it, which {_TEACHER} asks for")
        return
    size = get(keys, _MICRO, 2)
    values = _WITHOUT | {
        f"{ACTOR}.ppo_mini_batch_size": keys["data.train_batch_size"],
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": size,
        f"{ACTOR}.ppo_max_token_len_per_gpu": get(keys, _BUDGET, 1024),
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": size,
    }
    for key, value in values.items():
        if keys.written(key) and keys[key] != value:
            keys.ignore(key, f"the recipe gkd ({_TEACHER}) does not read it")
        keys.put(key, value)


def gkd(keys: Reader) -> dict[str, Any]:
    """The teacher, and the divergence from its most likely tokens, which is all that is learned from."""
    at, port = get(keys, f"{_TEACHER}.server_ip", "localhost"), get(keys, f"{_TEACHER}.server_port", 15555)
    keys.warn(
        f"{_TEACHER}: the {_LISTED} most likely tokens of the servers at {at}:{port} are learned from (--n-logprobs of their "
        "workers, at least); whether their tokenizer is the student's is not known, in verl neither"
    )
    for name in ("trainer.test_freq", "trainer.val_before_train"):
        keys.ignore(name, f"the recipe gkd ({_TEACHER}) does not validate")
    keys.origins["distillation.teachers.teacher.endpoints"] = f"{_TEACHER}.server_ip"
    return {
        "distillation.teachers": {"teacher": {"endpoints": [f"tcp://{at}:{port}"]}},
        "distillation.enters": "loss",
        **_loss(keys),
        "distillation.top_k": _LISTED,
        "distillation.temperature": 1.0,
        "reward.terms": [],
        "policy.epochs_per_step": 1,
    }


def _loss(keys: Reader) -> dict[str, Any]:
    """The divergence of the recipe: its one before April 2026 is the forward KL."""
    name, beta = get(keys, f"{_LOSS}.name", "kl").lower(), get(keys, f"{_LOSS}.beta", 0.5)
    if name not in _LOSSES:
        what = f"{_LOSS}.name={name} adds two divergences, and one is learned from"
        keys.problem(what, key=f"{_LOSS}.name", fix=f"use {_LOSS}.name=kl, or rkl")
        name = "kl"
    if name != "jsd":
        keys.ignore(f"{_LOSS}.beta", f"read with {_LOSS}.name=jsd only")
    divergence, rest = _LOSSES[name]
    settings = {"beta": beta} if name == "jsd" else {}
    return {"distillation.divergence": {"name": divergence} | settings, "distillation.top_k_rest": rest}


def gkd_loop(keys: Reader) -> dict[str, Any]:
    """The loop: responses are one step old, or two."""
    if get(keys, _SCHEDULER, "one_step_off") == "one_step_off":
        fields: dict[str, Any] = {"asynchronous.mode": "one_step", "asynchronous.max_staleness_steps": 1}
    else:
        fields = {"asynchronous.mode": "separate", "asynchronous.max_staleness_steps": 2}
    return fields | _WITHOUT_REWARDS
