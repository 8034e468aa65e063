"""The keys that a native configuration may have, read off the models of its root (RunConfig, where nothing else is said)."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from posttrain.config import RunConfig
from posttrain.config.base import Section
from posttrain.config.reading.sources import child

ITEM = "#"  # stands for any list index in a dotted key: reward.terms.#.name
NAME = "*"  # stands for any name in a mapping of sections: environment.named.*.max_turns


@cache
def sections(root: type[Section] = RunConfig) -> dict[str, dict[str, FieldInfo]]:
    """Dotted name of every section (``""`` is the top) -> its fields by name."""
    found: dict[str, dict[str, FieldInfo]] = {}
    _collect(root, "", found)
    return found


def _collect(model: type[Section], name: str, found: dict[str, dict[str, FieldInfo]]) -> None:
    found[name] = dict(model.model_fields)
    for key, field in model.model_fields.items():
        origin = get_origin(field.annotation)
        stand_in = ITEM if origin is list else NAME if origin is dict else None
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, Section):
                _collect(annotation, child(child(name, key), stand_in) if stand_in else child(name, key), found)


@cache
def known_keys(root: type[Section] = RunConfig) -> dict[str, FieldInfo]:
    """Every dotted key, sections included."""
    return {child(section, key): field for section, fields in sections(root).items() for key, field in fields.items()}


def pattern(key: str, root: type[Section] = RunConfig) -> str:
    """``reward.terms.0.name`` -> ``reward.terms.#.name``, ``environment.named.maze.weight`` -> ``environment.named.*.weight``"""
    found = ""
    for part in key.split("."):
        named = child(found, NAME) in sections(root)
        found = child(found, NAME if named else ITEM if part.isdecimal() else part)
    return found


def field_of(key: str, root: type[Section] = RunConfig) -> FieldInfo | None:
    """The field that a dotted key names, if it is one."""
    return known_keys(root).get(pattern(key, root))


def suggest(key: str, root: type[Section] = RunConfig) -> str:
    """What to tell someone who wrote an unknown key: the known key most like it, in the same section rather than in
    another (``data.samples_per_prompt`` is ``rollout.samples_per_prompt``); failing that, what the section holds."""
    section, _, leaf = key.rpartition(".")

    def likeness(known: str) -> float:
        known_section, _, known_leaf = known.rpartition(".")
        return SequenceMatcher(None, leaf, known_leaf).ratio() + (
            0.15 if known_section == pattern(section, root) else 0.0
        )

    best = max(sorted(known_keys(root), key=_importance), key=likeness)
    if likeness(best) >= 0.75:
        others = [known for known in known_keys(root) if known != best and known.rpartition(".")[2] == leaf]
        also = f" There is also {others[0]}." if len(others) == 1 else ""
        return f"did you mean {_as_written(best, key)}?{also}"
    here = sections(root).get(pattern(section, root), {})
    if section and here:
        return f"known in {section}: {', '.join(here)}"
    return f"known sections: {', '.join(sections(root)[''])}"


def _importance(key: str) -> tuple[bool, int]:
    """Sorts the keys of training before those of validation, and short ones before long."""
    return key.startswith("validation."), key.count(".")


def _as_written(known: str, key: str) -> str:
    """``reward.terms.#.name`` with the indices and names of the key that was written, or 0 and NAME."""
    written = key.split(".")
    return ".".join(
        part
        if part not in (ITEM, NAME)
        else written[place]
        if place < len(written) - 1
        else {ITEM: "0", NAME: "NAME"}[part]
        for place, part in enumerate(known.split("."))
    )


def is_number(annotation: Any) -> bool:
    """Tell whether an annotation asks for a number, and for nothing that a truth value would be too."""
    members = get_args(annotation) or (annotation,)
    numbers = any(
        part in (int, float) or type(part) is int for part in members
    )  # a Literal's members are numbers themselves
    return numbers and not any(part in (bool, str, Any) for part in members)
