"""Places of keys: the file and line, or the override, that messages point at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from posttrain.config.reading.broken_yaml import yaml_problem
from posttrain.errors import ConfigError, Problem
from posttrain.libraries import yaml_text

MERGE_TAG = "tag:yaml.org,2002:merge"
NO_NAMES = {"tag:yaml.org,2002:bool": "a truth value", "tag:yaml.org,2002:null": "null"}


@dataclass(frozen=True, slots=True)
class Place:
    """One spot where a key was written: a line (``run.yaml:41``) or an override (``override data.train_files=x``).

    ``whole`` is true when the value stands there in one piece (a scalar, an interpolation), so that everything the
    value turns out to contain was written there too.
    """

    text: str
    whole: bool


@dataclass(frozen=True, slots=True)
class SourceMap:
    """Dotted key -> place, for every key in a file and its overrides. List items count as keys: ``reward.terms.0``."""

    file: str | None
    places: Mapping[str, Place]

    def where(self, key: str) -> str:
        """The place of ``key`` for a message: that of a section written or removed as a whole is that of its keys; a key
        written nowhere is named as the default it is."""
        place = self.places.get(key)
        if place is not None:
            return _with_key(place.text, key)
        for parent in _parents(key):
            removed = parent in self.places and self.places[parent].text.startswith("override ~")
            if removed or (parent in self.places and self.places[parent].whole):
                return _with_key(self.places[parent].text, parent)
        return f"{key} (a default; {self.file or 'the command line'} does not set it)"

    def where_missing(self, key: str) -> str:
        """Return the place where a missing required key belongs: the section that lacks it, or the file."""
        for parent in (key, *_parents(key)):
            if parent in self.places:
                return _with_key(self.places[parent].text, parent)
        return self.file or "the command line"


def _parents(key: str) -> list[str]:
    """``a.b.c`` -> [``a.b``, ``a``]"""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _with_key(text: str, key: str) -> str:
    return text if text.startswith("override ") else f"{text} {key}"


def child(parent: str, key: object) -> str:
    """The dotted key of ``key`` inside ``parent`` (``""`` is the top)."""
    return f"{parent}.{key}" if parent else str(key)


def same_branch(one: str, other: str) -> bool:
    """Return True when one dotted key equals the other, or lies inside it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def places_of_yaml(text: str, file: str) -> dict[str, Place]:
    """The place of every key of a YAML document whose top is a mapping (an empty document counts as one).

    Raises: ConfigError, with file and line, for broken YAML, another top, keys written twice, an alias inside itself.
    """
    try:
        yaml_text.check(text)
        root = yaml_text.compose(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(yaml_problem(error, file)) from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        what = f"not readable as YAML: {str(error).splitlines()[0]}"
        raise ConfigError(Problem(what, where=f"{file}:{line}", fix="remove the character")) from None
    if root is None:
        return {}
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, SequenceNode) else "a single value"
        raise ConfigError(
            Problem(
                f"a configuration is a set of `key: value` lines, but this file holds {kind}",
                where=f"{file}:{root.start_mark.line + 1}",
                fix="start with sections such as `model:` and `data:`",
            )
        )
    places: dict[str, Place] = {}
    problems: list[Problem] = []
    _walk(root, "", file, places, problems, inside=())
    if problems:
        raise ConfigError(problems)
    return places


def _walk(
    node: Node, key: str, file: str, places: dict[str, Place], problems: list[Problem], inside: tuple[int, ...]
) -> None:
    """Note the place of everything below ``node``, which is the value of ``key``."""
    if id(node) in inside:
        problems.append(Problem(f"{key} contains itself through an alias", where=_line(file, node)))
        return
    inside = (*inside, id(node))
    if isinstance(node, MappingNode):
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            if key_node.tag == MERGE_TAG:
                continue
            name = child(key, key_node.value if isinstance(key_node, ScalarNode) else "?")
            line = key_node.start_mark.line + 1
            if key_node.tag in NO_NAMES:
                what = f"the key {name} is {NO_NAMES[key_node.tag]} in YAML, and keys are names"
                problems.append(Problem(what, where=f"{file}:{line}", fix=f'put it in quotes: "{key_node.value}"'))
            if name in lines:
                problems.append(
                    Problem(
                        f"{name} is written twice, on lines {lines[name]} and {line}",
                        where=f"{file}:{line}",
                        fix="keep one of them",
                    )
                )
            lines[name] = line
            places[name] = Place(f"{file}:{line}", whole=isinstance(value, ScalarNode))
            _walk(value, name, file, places, problems, inside)
        for merged in _merged(node):
            below: dict[str, Place] = {}
            _walk(merged, key, file, below, problems, inside)
            for name, place in below.items():
                places.setdefault(name, place)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            name = child(key, index)
            places[name] = Place(_line(file, item), whole=isinstance(item, ScalarNode))
            _walk(item, name, file, places, problems, inside)


def _merged(node: MappingNode) -> list[Node]:
    """The mappings that ``<<:`` pulls into this one."""
    values = [value for key_node, value in node.value if key_node.tag == MERGE_TAG]
    return [item for value in values for item in (value.value if isinstance(value, SequenceNode) else [value])]


def _line(file: str, node: Node) -> str:
    return f"{file}:{node.start_mark.line + 1}"


def places_of_value(key: str, value: Any, text: str) -> dict[str, Place]:
    """The places of a value that an override gives, all of them the override's."""
    places = {key: Place(text, whole=not isinstance(value, dict | list))}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        places |= places_of_value(child(key, name), item, text)
    return places
