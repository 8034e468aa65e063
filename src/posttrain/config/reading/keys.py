"""The keys that a native configuration may have: the fields of its root (RunConfig by default), and the settings of all
estimators and losses."""

from __future__ import annotations

from collections.abc import Collection
from difflib import SequenceMatcher
from functools import cache
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from posttrain.config import RunConfig
from posttrain.config.algorithm import AlgorithmSection
from posttrain.config.base import Section
from posttrain.config.docstrings import field_docstrings
from posttrain.config.reading.familiar import familiar_fix
from posttrain.config.reading.sources import child

ITEM = "#"  # stands for any list index in a dotted key: reward.terms.#.name
NAME = "*"  # stands for any name in a mapping of sections: environment.named.*.max_turns


@cache
def sections(root: type[Section] = RunConfig) -> dict[str, dict[str, FieldInfo]]:
    """Dotted name of every section (``""`` is the top) -> its fields by name."""
    return {name: dict(model.model_fields) | _settings_of(model) for name, model in section_classes(root).items()}


@cache
def _settings_of(model: type[Section]) -> dict[str, FieldInfo]:
    """The settings of all algorithms that a section chooses from; none for other sections. Their files are read."""
    if not issubclass(model, AlgorithmSection):
        return {}
    return {key: setting.field() for key, setting in model.registry.all_settings().items()}


@cache
def section_classes(root: type[Section] = RunConfig) -> dict[str, type[Section]]:
    """Dotted name of every section (``""`` is the top) -> its class."""
    found: dict[str, type[Section]] = {}
    _collect(root, "", found)
    return found


def _collect(model: type[Section], name: str, found: dict[str, type[Section]]) -> None:
    found[name] = model
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
        named = child(found, NAME) in section_classes(root)
        found = child(found, NAME if named else ITEM if part.isdecimal() else part)
    return found


def field_of(key: str, root: type[Section] = RunConfig) -> FieldInfo | None:
    """The field that a dotted key names, if it is one. Settings of algorithms are read where no other field has the name."""
    return _field(pattern(key, root), root)


@cache
def _field(key: str, root: type[Section]) -> FieldInfo | None:
    section, _, name = key.rpartition(".")
    model = section_classes(root).get(section)
    if model is None:
        return None
    return model.model_fields.get(name) or _settings_of(model).get(name)


def meaning(key: str, root: type[Section] = RunConfig) -> str:
    """The description of the field that a dotted key names, on one line; empty for a key that is none."""
    field = field_of(key, root)
    if field is None:
        return ""
    section, _, name = pattern(key, root).rpartition(".")
    return " ".join((field.description or field_docstrings(section_classes(root)[section]).get(name, "")).split())


def has_key(key: str, root: type[Section] = RunConfig) -> bool:
    """Return True for a section, a field, an item of a field that is a list, and any key below a field that is a mapping."""
    found = pattern(key, root)
    if found in section_classes(root):
        return True
    whole = ""
    for part in found.split("."):
        whole = child(whole, part)
        field = _field(whole, root)
        if field is not None and not any(
            section == whole or section.startswith(f"{whole}.") for section in section_classes(root)
        ):
            kinds = {get_origin(each) or each for each in (field.annotation, *get_args(field.annotation))}
            return whole == found or bool(kinds & {list, tuple, dict})
    return _field(whole, root) is not None


def suggest(key: str, root: type[Section] = RunConfig, here: Collection[str] = ()) -> str:
    """The fix for an unknown key: the known key most like it, in the same section rather than in another
    (``data.samples_per_prompt`` is ``rollout.samples_per_prompt``); failing that, the keys of the section.

    Args: ``here`` lists the keys of the section; of one that chooses an algorithm, with the settings of that one alone, which
        come before those of other algorithms.
    """
    section, _, leaf = key.rpartition(".")
    if leaf not in here and (fix := familiar_fix(leaf, known_keys(root))):
        return fix
    own = [child(section, name) for name in here]
    keys = dict.fromkeys([*known_keys(root), *own])

    def likeness(known: str) -> float:
        known_section, _, known_leaf = known.rpartition(".")
        near = 0.15 if known_section == pattern(section, root) else 0.0
        return SequenceMatcher(None, leaf, known_leaf).ratio() + near + (0.1 if known in own else 0.0)

    best = max(sorted(keys, key=_importance), key=likeness)
    if likeness(best) >= 0.75:
        others = [known for known in known_keys(root) if known != best and known.rpartition(".")[2] == leaf]
        also = f" There is also {others[0]}." if len(others) == 1 else ""
        return f"did you mean {_as_written(best, key)}?{also}"
    here = here or sections(root).get(pattern(section, root), {})
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
