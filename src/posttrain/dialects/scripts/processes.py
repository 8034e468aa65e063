"""Devices of a trainer that a launcher starts once for each of them: torchrun, or ``python -m torch.distributed.run``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.dialects.scripts.trainers import Trainer
from posttrain.dialects.words import OUR_SECTION

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_SFT = ("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer")


def processes_of(words: Sequence[str], trainer: Trainer) -> tuple[str, str]:
    """Return how many processes a launcher starts on a machine, and on how many machines, as it is written; "" where it says
    nothing. A trainer that starts its own processes reads them from its keys.

    Args: ``words`` stand before the trainer in its command.
    """
    names = [word.rpartition("/")[2] for word in words]
    if trainer.module not in _SFT or not any(name in _LAUNCHERS for name in names):
        return "", ""
    return _option(words, "nproc-per-node"), _option(words, "nnodes")


def _option(words: Sequence[str], name: str) -> str:
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            return value if equals else words[place + 1] if words[place + 1 :] else ""
    return ""


def world(processes: str, machines: str, *, unknown: int) -> tuple[str, ...]:
    """Return the keys of so many devices; ``unknown`` stands for a number of processes that is not known, 0 for no keys then."""
    per_node = int(processes) if re.fullmatch(r"[1-9]\d*", processes) else unknown
    nodes = int(machines) if re.fullmatch(r"[1-9]\d*", machines) else 1
    if not processes or not per_node:
        return ()
    return (f"++{OUR_SECTION}.placement.devices={per_node * nodes}", f"++{OUR_SECTION}.placement.nodes={nodes}")
