"""Workers that a program on verl puts in the place of verl's own, whose updates are not called: parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from posttrain.checkout_files import file_of, parsed
from posttrain.dialects.scripts.asks import Ask
from posttrain.dialects.scripts.own_sources import imports_of


def own_workers(program: Path, roots: Sequence[Path]) -> Ask | None:
    """Return the confirmation that a run needs where a program imports worker classes of the checkout from outside of verl's
    package; None where all are verl's."""
    source = parsed(program)
    if source is None:
        return None
    read = {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}
    found = []
    for name, given in imports_of(source).items():
        if not given.name.endswith("Worker") or given.module.partition(".")[0] == "verl" or name not in read:
            continue
        place = file_of(given.module, program, roots)
        within = parsed(place) if place is not None else None
        for node in within.body if within is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == given.name:
                found.append(f"{given.name} (line {node.lineno} of {place})")
    if not found:
        return None
    return Ask(
        field=f"{program.stem}.workers",
        title=f"{program} puts workers of its own in the place of verl's:",
        parts=(", ".join(found),),
        end="; a run computes verl's updates",
        meant="confirm by name that verl's are meant",
    )
