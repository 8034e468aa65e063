"""Environments, estimators and losses that a program on SkyRL registers, as overrides for our own fields. Files are parsed, never
run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.checkout_files import file_of, parsed
from posttrain.dialects.scripts.own_environments import registered_environments
from posttrain.dialects.scripts.own_sources import imports_of
from posttrain.dialects.scripts.trainers import Trainer
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, Registry
from posttrain.verl_functions import find

# SkyRL's words for an estimator and a loss by name -> our section of it
_CHOSEN = {
    "advantage": re.compile(r"""\+*trainer\.algorithm\.advantage_estimator=["']?(\w+)["']?"""),
    "loss": re.compile(r"""\+*trainer\.algorithm\.p(?:olicy|po)_loss_type=["']?(\w+)["']?"""),
}
_BUILT_IN: dict[str, Registry[Any]] = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES}
_BY_RULES = ("no_op",)  # of SkyRL's program of on-policy distillation, which the dialect's rules read


def with_registered(trainer: Trainer, file: Path, words: Sequence[str], roots: Sequence[Path]) -> Trainer:
    """Add the overrides for what a program of SkyRL's registers: environments, and the estimator and loss of its command."""
    if trainer.dialect != "skyrl":
        return trainer
    registered = registered_environments(file, words, roots)
    return replace(trainer, adds=(*trainer.adds, *registered, *_functions(file, words, roots)))


def _functions(file: Path, words: Sequence[str], roots: Sequence[Path]) -> Iterator[str]:
    """Overrides for an advantage estimator and a policy loss, ``PolicyLossRegistry.register("mine", function)`` or its
    decorator, in the program or in a file of its own that it imports."""
    for section, pattern in _CHOSEN.items():
        chosen = [found[1] for word in words if (found := pattern.fullmatch(word))]
        if not chosen or chosen[-1] in _BY_RULES or _BUILT_IN[section].is_built_in(chosen[-1]):
            continue
        for place, source in _with_imported(file, roots):
            function = find(source, chosen[-1])
            if function is not None and function.is_loss == (section == "loss"):
                yield f"++posttrain.{section}.path='{place}'"
                break


def _with_imported(file: Path, roots: Sequence[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """A program, and the files of the same checkout that it imports; those that cannot be parsed are passed over."""
    source = parsed(file)
    if source is None:
        return
    yield file, source
    modules = {each.module: None for each in imports_of(source).values()}
    modules |= {name.name: None for node in ast.walk(source) if isinstance(node, ast.Import) for name in node.names}
    for place in dict.fromkeys(file_of(module, file, roots) for module in modules):
        if place is not None and (within := parsed(place)) is not None:
            yield place, within
