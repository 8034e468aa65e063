"""Heads for several tokens ahead, which speed up sampling: they are left out where their loss does not reach the policy."""

from __future__ import annotations

from posttrain.dialects.reader import Reader


def refuse_joint_loss(keys: Reader, section: str) -> None:
    """Refuse the loss of verl's heads where it trains the policy, too: ``enable_train`` without ``detach_encoder``."""
    heads = f"{section}.mtp"
    if keys.ledger.find(f"{heads}.enable") is None or not keys[f"{heads}.enable"] or not keys[f"{heads}.enable_train"]:
        return
    if not keys[f"{heads}.detach_encoder"]:
        what = f"{heads}.detach_encoder is false: the loss of the heads would train the policy, too, and they are not loaded here"
        fix = f"use {heads}.detach_encoder=True, which trains the policy alike without them"
        keys.problem(what, key=f"{heads}.enable_train", fix=fix, refused=True)


def refuse_joint_heads(keys: Reader, key: str) -> None:
    """Refuse ROLL's heads whose loss trains the policy, too; those of ``standalone`` train beside it."""
    if keys.ledger.find(key) is not None and keys[key] == "joint":
        what = f"{key}=joint: the loss of the heads would train the policy, too, and they are not loaded here"
        keys.problem(
            what, key=key, fix=f"use {key}=standalone, which trains the policy alike without them", refused=True
        )
