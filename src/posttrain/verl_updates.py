"""verl's own advantages, losses and updates, of any date: what a checkout has changed in them.

A fork keeps verl's names, ``compute_grpo_outcome_advantage``, ``update_policy``, and changes what they compute; a run computes
verl's. ``verl_updates.json`` holds a digest of every function and method in the history of these files; ``tools/verl_scoring.py``
writes it. Files are parsed, never run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.checkout_files import parsed
from posttrain.registry import ADVANTAGES, POLICY_LOSSES
from posttrain.verl_scoring import DIGITS, digest_of

ALGORITHMS = "verl/trainer/ppo/core_algos.py"
TRAINER = "verl/trainer/ppo/ray_trainer.py"
ACTORS = {"fsdp": "verl/workers/actor/dp_actor.py", "megatron": "verl/workers/actor/megatron_actor.py"}
CODE = (ALGORITHMS, TRAINER, "verl/workers/actor")

_ESTIMATOR = "algorithm.adv_estimator"
_STRATEGY = "actor_rollout_ref.actor.strategy"
_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_IN_LOSS, _IN_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"
_ADVANTAGE = re.compile(r"compute_(\w+?)(?:_outcome)?_advantage(?:_return)?")
_LOSS = re.compile(r"compute_policy_loss(?:_(\w+))?")
_UPDATES = ("update_policy", "compute_log_prob", "_forward_micro_batch", "forward_backward_batch")
_PLAIN_LOSSES = ("", "vanilla")

Look = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A function or method that no version of verl has so."""

    name: str
    file: str  # as in verl
    line: int

    def may_happen(self, look: Look) -> bool:
        """Return False where a configuration does not use it. Args: look, the value of a key, or anything that is no text, no
        number and no truth value without one."""
        last = self.name.rpartition(".")[2]
        if self.file in ACTORS.values():
            strategy = look(_STRATEGY)
            return not isinstance(strategy, str) or ACTORS.get(strategy.rstrip("2"), self.file) == self.file
        if last == "apply_kl_penalty":
            return look(_IN_REWARD) is not False
        if last.startswith("kl_penalty"):
            return look(_IN_REWARD) is not False or look(_IN_LOSS) is not False
        if last == "compute_value_loss":
            return look(_ESTIMATOR) == "gae"
        if (advantage := _ADVANTAGE.fullmatch(last)) is not None:
            # One of the fork's own is called as it is
            return ADVANTAGES.is_built_in(advantage[1]) and bool(look(_ESTIMATOR) == advantage[1])
        if (loss := _LOSS.fullmatch(last)) is not None:
            mode = look(_MODE)
            mode, own = mode if isinstance(mode, str) else "", loss[1] or ""
            is_plain = mode in _PLAIN_LOSSES
            return own in _PLAIN_LOSSES if is_plain else own == mode and POLICY_LOSSES.is_built_in(mode)
        return True


def changed_updates(root: Path) -> dict[str, list[Changed]]:
    """Return the functions of a checkout that a step may compute with and that verl does not have so, by verl's file."""
    found: dict[str, list[Changed]] = {}
    for file in (ALGORITHMS, TRAINER, *ACTORS.values()):
        source = parsed(root / file)
        for name, node in functions(source) if source is not None else ():
            if _counts(name, file) and digest_of(node) not in _known():
                found.setdefault(file, []).append(Changed(name=name, file=file, line=node.lineno))
    return found


def functions(source: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a file and the methods of its classes, as ``CLASS.METHOD``."""
    for node in source.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def _counts(name: str, file: str) -> bool:
    """Return True for a function that changes a step's numbers in a way that nothing else here looks at."""
    if file == TRAINER:
        return name == "apply_kl_penalty"
    if file in ACTORS.values():
        return name.rpartition(".")[2] in _UPDATES
    fixed = ("agg_loss", "compute_value_loss", "apply_kl_penalty")
    return name in fixed or name.startswith("kl_penalty") or bool(_ADVANTAGE.fullmatch(name) or _LOSS.fullmatch(name))


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    text = Path(__file__).with_suffix(".json").read_text("utf-8")
    digests: str = json.loads(text)["digests"]
    return frozenset(digests[at : at + DIGITS] for at in range(0, len(digests), DIGITS))
