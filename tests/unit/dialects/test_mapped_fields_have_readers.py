"""Every field that a mapped key sets has a reader outside of config and dialects, by its type and not by its name alone.

test_examples.py changes every mapped key and asks for another configuration; this is the other half.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from tests.unit.dialects.config_readers import Readers, find_readers, parsed
from tests.unit.dialects.program_types import Program, Type

from posttrain.dialects.detect import load_dialect
from posttrain.registry import ADVANTAGES, DIVERGENCES, POLICY_LOSSES

pytestmark = pytest.mark.slow
ROOTS = {
    "train": "RunConfig", "sft": "SftConfig", "tune": "TuneConfig", "generate": "GenerateConfig", "evaluate": "EvaluateConfig",
}  # fmt: skip
# Entries of these reach a library, or a plan of an engine, by their names: test_mapped_rows_are_read.py.
HANDED_ON = ("engine_options", "engine_sampling")
FUNCTIONS = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES, "distillation.divergence": DIVERGENCES}


@cache
def trees() -> dict[str, ast.Module]:
    return parsed()


@cache
def readers() -> Readers:
    return find_readers(trees())


@cache
def program() -> Program:
    return Program(trees())


def mapped() -> Iterator[tuple[str, str, str]]:
    """Entry, field and key of every mapped row."""
    for dialect in ("verl", "skyrl", "roll"):
        for row in load_dialect(dialect).ledger.rows:
            if row.status == "mapped":
                yield from ((row.entry, field, f"{dialect} {row.name}") for field in row.fields)


def steps(entry: str, path: str) -> Iterator[tuple[str, str]]:
    """(section, field) of every part of a dotted path, up to where free entries begin; these as ("", path)."""
    types = Type(frozenset({ROOTS[entry]}))
    parts = path.split(".")
    for number, part in enumerate(parts):
        if part.isdecimal():
            types = types.each
            continue
        known = program().sections
        owners = [name for name in types.classes if name in known and part in known[name].model_fields]
        if not owners and types.element is not None and types.element.classes:
            types = types.element  # an entry with a name of the user's
            continue
        if not owners:
            yield "", ".".join(parts[:number]) + ":" + ".".join(parts[number:])
            return
        yield from ((owner, part) for owner in owners)
        inside = [found for owner in owners if (found := program().of_field(owner, part)) is not None]
        types = inside[0]
        for each in inside[1:]:
            types |= each


def places_of(found: Readers, section: str, field: str) -> set[str]:
    """The places where the field is read, from that section or from one that it extends."""
    known = program().sections
    return {
        place
        for (one, name), places in found.reads.items()
        if name == field and one in known and issubclass(known[section], known[one])
        for place in places
    }


def test_every_field_is_read_where_something_is_done() -> None:
    seen = {(section, field, key) for entry, path, key in mapped() for section, field in steps(entry, path) if section}
    assert len({(section, field) for section, field, _ in seen}) > 400
    unread = sorted(
        f"{key} -> {section}.{field}" for section, field, key in seen if not places_of(readers(), section, field)
    )
    assert unread == []


def test_a_reader_that_is_taken_away_is_missed() -> None:
    """Of every field with a single reader, that reader is renamed; then nobody reads it."""
    fields = {(section, field) for entry, path, _ in mapped() for section, field in steps(entry, path) if section}
    alone = {}
    for one in fields:
        places = places_of(readers(), *one)
        if len(places) == 1 and re.fullmatch(r"[\w/]+\.py:\d+", place := next(iter(places))):
            alone[one] = place
    assert len(alone) > 50
    changed = parsed()
    gone = {(place.split(":")[0], int(place.split(":")[1]), field) for (_, field), place in alone.items()}
    for path, tree in changed.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (path, node.lineno, node.attr) in gone:
                node.attr = "gone"
    found = find_readers(changed)
    assert [one for one in alone if places_of(found, *one)] == []


def _uses(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    parameters = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
    used = (each for statement in node.body for each in ast.walk(statement) if isinstance(each, ast.Name))
    return name in parameters and any(each.id == name for each in used)


def test_every_setting_of_a_function_is_used_by_one_that_takes_it() -> None:
    """Settings of estimators, losses and divergences are their own parameters; those of environments, of the environment's."""
    free = {path for entry, field, _ in mapped() for section, path in steps(entry, field) if not section}
    functions = [
        (file, node)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    unused = []
    for path in sorted(free):
        section, _, name = path.partition(":")
        if any(part in section.split(".") for part in HANDED_ON):
            continue
        places = {
            "advantage": "algos/",
            "loss": "algos/",
            "method": "algos/",
            "distillation.divergence": "algos/",
            "environment.settings": ("envs/", "backends/"),
        }
        assert section in places, path
        if not any(file.startswith(places[section]) and _uses(node, name.split(".")[0]) for file, node in functions):
            unused.append(path)
        if section in FUNCTIONS:
            assert name in FUNCTIONS[section].all_settings(), path
    assert unused == []
