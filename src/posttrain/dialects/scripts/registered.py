"""Environments, estimators and losses that a program on verl or SkyRL registers, as overrides for our own fields. Files are
parsed, never run."""

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

# The peers' words for an estimator and a loss by name, by our section of it
_CHOSEN = {
    "skyrl": {
        "advantage": re.compile(r"""\+*trainer\.algorithm\.advantage_estimator=["']?(\w+)["']?"""),
        "loss": re.compile(r"""\+*trainer\.algorithm\.p(?:olicy|po)_loss_type=["']?(\w+)["']?"""),
    },
    "verl": {
        "advantage": re.compile(r"""\+*algorithm\.adv_estimator=["']?(\w+)["']?"""),
        "loss": re.compile(r"""\+*actor_rollout_ref\.actor\.policy_loss\.loss_mode=["']?(\w+)["']?"""),
    },
}
_BUILT_IN: dict[str, Registry[Any]] = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES}
_BY_RULES = ("no_op",)  # of SkyRL's program of on-policy distillation, which the dialect's rules read


def with_registered(trainer: Trainer, file: Path, words: Sequence[str], roots: Sequence[Path]) -> Trainer:
    """Add the overrides for what a program registers: the estimator and loss of its command, and environments of SkyRL's."""
    if trainer.dialect not in _CHOSEN:
        return trainer
    registered = registered_environments(file, words, roots) if trainer.dialect == "skyrl" else ()
    return replace(trainer, adds=(*trainer.adds, *registered, *_functions(trainer.dialect, file, words, roots)))


def _functions(dialect: str, file: Path, words: Sequence[str], roots: Sequence[Path]) -> Iterator[str]:
    """Overrides for an advantage estimator and a policy loss, ``PolicyLossRegistry.register("mine", function)`` or a
    decorator, in the program or in a file of its own that it imports."""
    for section, pattern in _CHOSEN[dialect].items():
        chosen = [found[1] for word in words if (found := pattern.fullmatch(word))]
        if not chosen or chosen[-1] in _BY_RULES or _BUILT_IN[section].is_built_in(chosen[-1]):
            continue
        for place, source in _with_imported(file, roots, through=dialect == "verl"):
            function = find(source, chosen[-1])
            if function is not None and function.is_loss == (section == "loss"):
                yield f"++posttrain.{section}.path='{place}'"
                break


def _with_imported(file: Path, roots: Sequence[Path], *, through: bool) -> Iterator[tuple[Path, ast.Module]]:
    """A program, and the files of the same checkout that it imports; those that cannot be parsed are passed over.

    Args: ``through`` follows the imports of those files, too, but for the peer's own package: verl's workers import the
        losses of a recipe, and its program imports the workers.
    """
    open_files, seen = [file], {file}
    while open_files:
        place = open_files.pop(0)
        source = parsed(place)
        if source is None:
            continue
        yield place, source
        if not through and place != file:
            continue
        for module in _imported_modules(source):
            further = None if through and module.partition(".")[0] == "verl" else file_of(module, place, roots)
            if further is not None and further not in seen:
                seen.add(further)
                open_files.append(further)


def _imported_modules(source: ast.Module) -> list[str]:
    """The modules that a file imports, and those that ``from package import module`` may mean."""
    modules = [each.module for each in imports_of(source).values()]
    modules += [
        f"{each.module}{'' if each.module.endswith('.') else '.'}{each.name}" for each in imports_of(source).values()
    ]
    modules += [name.name for node in ast.walk(source) if isinstance(node, ast.Import) for name in node.names]
    return list(dict.fromkeys(modules))
