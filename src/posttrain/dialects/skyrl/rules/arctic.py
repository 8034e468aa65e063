"""SkyRL's integration of Arctic's server (``trainer.override_entrypoint=integrations.arctic_rl.entrypoint``), August 2026.

Its program samples, scores and estimates advantages as SkyRL does, and has one update made of the whole step: clipped PPO,
averaged over all tokens of the step, with log-probs that are recomputed just before, so that no ratio is clipped; without a
critic, and without a reference. Here the engines of this program make that update; how the server splits its work has no meaning.
"""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import name_of

KEY = "trainer.override_entrypoint"
PROGRAM = "integrations.arctic_rl.entrypoint"
SECTION = "trainer.arctic_rl"
# Updates over which its program lets the learning rate of a server rise, whatever the length of the run
HORIZON = 1000
_ALGORITHM = "trainer.algorithm"
_ONE_UPDATE = "Arctic's program has one update made of the whole step"
_LOSS = "Arctic's server trains by clipped PPO, averaged over the tokens of a step"
_RATE = f"Arctic's server reads {SECTION}.lr_warmup_ratio"
# SkyRL's keys that its program does not read, what it does instead, and why
_FIXED: dict[str, tuple[Any, str]] = {
    f"{_ALGORITHM}.ppo_loss_type": ("regular", _LOSS),
    f"{_ALGORITHM}.loss_reduction": ("token_mean", _LOSS),
    f"{_ALGORITHM}.use_entropy_loss": (False, _LOSS),
    f"{_ALGORITHM}.use_tis": (False, _LOSS),
    f"{_ALGORITHM}.off_policy_correction.tis_ratio_type": (None, _LOSS),
    f"{_ALGORITHM}.off_policy_correction.sequence_mask_metric": (None, _LOSS),
    "trainer.policy.optimizer_config.scheduler": ("constant", _RATE),
    "trainer.policy.optimizer_config.num_warmup_steps": (0, _RATE),
    "trainer.policy.optimizer_config.adam_betas": ([0.9, 0.999], f"Arctic's server reads {SECTION}.optimizer_betas"),
    "trainer.gradient_checkpointing": (True, f"Arctic's server reads {SECTION}.enable_gradient_checkpointing"),
    "trainer.policy.sequence_parallel_size": (1, f"Arctic's server reads {SECTION}.ulysses_sequence_parallel_size"),
    "trainer.placement.colocate_all": (False, f"Arctic's server reads {SECTION}.colocate"),
}


def is_arctic(keys: Reader) -> bool:
    """Return True where Arctic's program trains; another program in the place of SkyRL's is refused."""
    chosen = keys[KEY] if keys.ledger.find(KEY) else None
    if chosen == PROGRAM:
        return True
    if chosen is not None:
        what = f"{KEY} is refused: {chosen} is a program that trains in the place of SkyRL's, and is not run"
        keys.problem(
            what, key=KEY, fix=f"remove it: SkyRL's loop trains with the other keys; {PROGRAM} is known", refused=True
        )
    for row in keys.ledger.rows:
        if row.name.startswith(f"{SECTION}.") and row.status == "mapped":
            keys.ignore(row.name, f"only {PROGRAM} reads it, which {KEY} would name")
    return False


def read_as_arctic(keys: Reader) -> None:
    """Let the rules read the keys that Arctic's program does not read as what it does."""
    prompts, mini = keys["trainer.train_batch_size"], "trainer.policy_mini_batch_size"
    if keys[mini] != prompts:
        keys.ignore(mini, _ONE_UPDATE)
        keys.put(mini, prompts)
    for key, (does, why) in _FIXED.items():
        written = name_of(keys, key)
        if keys.ledger.find(written) and keys.written(written) and keys[written] != does:
            keys.ignore(written, why)
        if keys.ledger.find(written):
            keys.put(written, does)
    keys.put("trainer.policy.optimizer_config.adam_betas", keys[f"{SECTION}.optimizer_betas"])
    keys.put("trainer.gradient_checkpointing", keys[f"{SECTION}.enable_gradient_checkpointing"])
    keys.put("trainer.policy.sequence_parallel_size", keys[f"{SECTION}.ulysses_sequence_parallel_size"])
    keys.put("trainer.placement.colocate_all", keys[f"{SECTION}.colocate"])
    _refuse(keys)
    keys.warn(
        f"{PROGRAM} is read as the request to its server: one update of the whole step, by the engine of trainer.strategy"
    )


def _refuse(keys: Reader) -> None:
    """Refuse what Arctic's program stops at."""
    epochs, estimator = "trainer.update_epochs_per_batch", f"{_ALGORITHM}.advantage_estimator"
    if keys[epochs] != 1:
        keys.problem(f"Arctic's program makes one epoch of a step, and {epochs} is {keys[epochs]}", key=epochs,
                     fix=f"use {epochs}=1")  # fmt: skip
    if keys[estimator] == "gae":
        keys.problem("Arctic's program has no critic, and gae needs one", key=estimator, fix=f"use {estimator}=grpo")
    for name in ("use_kl_loss", "use_kl_in_reward"):
        if keys[key := f"{_ALGORITHM}.{name}"]:
            keys.problem(f"Arctic's program has no reference, and {name} is true", key=key, fix=f"use {key}=false")


def warmup(keys: Reader) -> dict[str, Any]:
    """Return the field of the warm-up: a share of the horizon that Arctic's program gives its server."""
    return {"policy.schedule.warmup_updates": round(keys[f"{SECTION}.lr_warmup_ratio"] * HORIZON)}
