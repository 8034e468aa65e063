"""Overrides from the command line, in Hydra's grammar: ``a.b=1``, ``+a.b=1``, ``++a.b=1``, ``~a.b``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, Protocol

from posttrain.config.reading.hydra import SECTION
from posttrain.config.reading.plain_overrides import plain_override
from posttrain.config.reading.sources import Place, child, places_of_value
from posttrain.errors import ConfigError, Problem, did_you_mean

QUOTING = (
    "write key=value; a value with =, ~, commas, brackets or spaces at its ends goes into quotes inside the "
    "argument: \"key='value'\""
)


_HOME = re.compile(r"^([+\w./@]+=)(~/[\w./-]*)$")


class KnownKeys(Protocol):
    """The keys that a dialect's own files hold, although the user's file does not write them all."""

    def has(self, key: str) -> bool: ...

    def reports_later(self, key: str) -> bool:
        """Return True for a key that may be set although it is not there, because the dialect reports it by itself."""
        ...

    def absent(self, key: str, override: str) -> tuple[str, str]:
        """Describe the problem of an override of a missing key, and its fix."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """One parsed override."""

    text: str  # as typed
    key: str  # dotted
    action: Literal["set", "add", "force", "delete"]  # =  +  ++  ~
    value: Any  # plain; for delete, the value that must be there, or None

    @property
    def where(self) -> str:
        return f"override {self.text}"

    @property
    def of_hydra(self) -> bool:
        """True when it configures Hydra's own program (``hydra.run.dir=...``)."""
        return self.key.split(".")[0] == SECTION


def parse_overrides(texts: Sequence[str]) -> list[Assignment]:
    """Parse overrides in Hydra's grammar, with Hydra's own parser where they are not plain: quoting and types are Hydra's.

    Raises: ConfigError with every argument that is not an override, or is a sweep.
    """
    assignments: list[Assignment] = []
    problems: list[Problem] = []
    if apart := _blanks_around_equals(texts):
        raise ConfigError(apart)
    for text in texts:
        plain = plain_override(text)
        read = Assignment(text, *plain) if plain is not None else _read_by_hydra(text)
        if isinstance(read, Assignment):
            assignments.append(read)
        else:
            problems.append(read)
    if problems:
        raise ConfigError(problems)
    return assignments


def _read_by_hydra(text: str) -> Assignment | Problem:
    """Read an override by Hydra's parser. Returns: it, or the problem of an argument that is none, or is a sweep."""
    # Imported here: the parser takes longer to load than everything else that reads a configuration.
    from hydra.errors import HydraException

    where = f"override {text}"
    try:
        # A shell leaves ~ behind an = as it is, and Hydra's grammar has no such character.
        parsed = _parse(_HOME.sub(r"\1'\2'", text))
    except HydraException as error:
        if read := _as_json(text):
            return read
        reason = _reason(error) if "=" in text else "there is no ="
        return Problem(f"{text!r} is not an override ({reason})", fix=_quoted(text))
    except RecursionError:
        return Problem(f"{text[:60]!r}… nests too deep for an override", fix="write the value in a file")
    except ValueError as error:  # Python reads whole numbers of at most 4,300 digits
        return Problem(f"{text[:60]!r}… cannot be read ({str(error).partition(';')[0]})")
    if parsed.is_sweep_override():
        fix = f"run once per value, or, for a list, write {parsed.key_or_group}=[...]"
        return Problem("a sweep over several values is not one run", where=where, fix=fix)
    if not parsed.key_or_group:
        return Problem("the key must be a dotted name such as data.train_files", where=where)
    key = parsed.key_or_group if parsed.package is None else f"{parsed.key_or_group}@{parsed.package}"
    return Assignment(text, key, _action(parsed), parsed.value())


@lru_cache(maxsize=4096)
def _parse(text: str) -> Any:
    return _parser().parse_overrides([text])[0]


@cache
def _parser() -> Any:
    """Hydra's parser, which reads the signatures of its eleven functions when it is made."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _as_json(text: str) -> Assignment | None:
    """An override whose value is a JSON object, whose quoted names Hydra's grammar does not have; None for any other."""
    match = re.fullmatch(r"(\+{0,2})([\w.]+)=(\{.*\})", text, flags=re.S)
    if match is None:
        return None
    try:
        value = json.loads(match[3])
    except ValueError:
        return None
    actions: dict[str, Literal["set", "add", "force"]] = {"": "set", "+": "add", "++": "force"}
    return Assignment(text, match[2], actions[match[1]], value)


def _blanks_around_equals(texts: Sequence[str]) -> list[Problem]:
    """Report ``key =value``, ``key= value``, ``key = value`` and ``key=two words``, which the shell cuts into several."""
    problems = []
    for index, text in enumerate(texts):
        if "=" not in text and index and re.fullmatch(r"[+\w.]+=[\w.-]+", texts[index - 1]) and text[:1] not in "~+-":
            key, _, value = texts[index - 1].partition("=")
            what = f"{text!r} is not an override (there is no =)"
            fix = f"a value with blanks goes into both kinds of quotes: \"{key}='{value} {text}'\""
            problems.append(Problem(what, fix=fix))
            continue
        before, after = texts[index - 1 : index] if index else [], list(texts[index + 1 : index + 2])
        if text.startswith("=") and before and "=" not in before[0]:
            whole = before[0] + (text if text != "=" else "=" + "".join(after))
        elif text.endswith("=") and text.count("=") == 1 and text != "=" and after and "=" not in after[0]:
            whole = text + after[0]
        else:
            continue
        problems.append(Problem(f"there are blanks around the = of {whole}", fix=f"write {whole}"))
    return problems


def _quoted(text: str) -> str:
    """The fix for an argument that cannot be parsed: the same with its value in quotes, where that can be."""
    key, equals, value = text.partition("=")
    if (key, value) != (key.strip(), value.strip()) and re.fullmatch(
        r"[\w.+~]+=[\w./-]+", f"{key.strip()}={value.strip()}"
    ):
        return f"write {key.strip()}={value.strip()}"
    if re.fullmatch(r"[+~]*[\w.]+ *", key) and equals and "'" not in value and not value.strip().startswith(("[", "{")):
        return f"write \"{key.strip()}='{value.strip()}'\", with both kinds of quotes"
    return QUOTING


def _reason(error: Exception) -> str:
    """Hydra's own words, without the part that repeats the argument and the link."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith(("Error parsing", "See http"))]
    first = lines[0] if lines else ""
    if first.startswith("LexerNoViableAlt"):
        return "a character that needs quotes"
    if first.startswith("no viable alternative"):
        return "a bracket or a quote is not closed, or stands in the wrong place"
    if first.startswith("missing EQUAL"):
        return "= does not follow the key"
    return first


def _action(parsed: Any) -> Literal["set", "add", "force", "delete"]:
    if parsed.is_delete():
        return "delete"
    return "add" if parsed.is_add() else "force" if parsed.is_force_add() else "set"


def apply_overrides(
    values: dict[str, Any],
    places: dict[str, Place],
    assignments: Sequence[Assignment],
    *,
    struct: bool,
    known: KnownKeys | None = None,
) -> list[Problem]:
    """Change ``values`` and ``places`` in place, one assignment after the other. Mappings merge, lists are replaced.

    Args: ``struct`` is Hydra's rule that a key which is not there yet needs a ``+``; ``known`` keys count as there, with
        and without it. Deleting one of those sets it to null.
    Returns: a problem for every assignment that cannot be done, and is left out.
    """
    problems = []
    for assignment in assignments:
        problem = _apply(values, places, assignment, struct, known)
        if problem is not None:
            problems.append(problem)
    return problems


def _apply(
    values: dict[str, Any], places: dict[str, Place], this: Assignment, struct: bool, known: KnownKeys | None
) -> Problem | None:
    if "@" in this.key:
        what = f"the key must be a dotted name, or a group of the file's defaults list, which {this.key} is not"
        return Problem(what, where=this.where, fix="write a key such as data.train_files")
    by_default = known is not None and known.has(this.key)
    later = known is not None and known.reports_later(this.key)
    needed = not by_default and (this.action == "delete" or (struct and this.action == "set" and not later))
    *parents, last = this.key.split(".")
    node: Any = values
    path = ""
    for part in parents:
        step = _enter(node, part)
        if step is None:
            length = len(node)
            return Problem(f"{path} is a list of {length}, it has no item {part}", where=this.where)
        path = child(path, part)
        there = isinstance(node, list) or (step in node and node[step] is not None)
        if not there and needed:
            return _absent(this, places, known)
        if not there:
            node[step] = {}
            places[path] = Place(this.where, whole=False)
        if _is_reference(node[step]) and this.action in ("add", "force"):
            node[step] = {}  # as OmegaConf does: what stood behind the reference does not count any more
            _forget(places, path)
            places[path] = Place(this.where, whole=False)
        node = node[step]
        if not isinstance(node, dict | list):
            fix = f"override {path} as a whole"
            if _is_reference(node):
                fix += f", or put a section in its place: ++{this.text.lstrip('+')}"
            return Problem(f"{path} is {node!r}, which has nothing below it", where=this.where, fix=fix)
    step = _enter(node, last)
    if step is None or (isinstance(node, list) and this.action == "delete"):
        what = f"{path} is a list of {len(node)}; its items can be replaced, not added or deleted"
        return Problem(what, where=this.where, fix=f"write the whole list: {path}=[...]")
    exists = isinstance(node, list) or step in node

    if this.action == "delete":
        if not exists and not by_default:
            return _absent(this, places, known)
        if not exists:
            node[step] = None
            places[this.key] = Place(this.where, whole=True)
            return None
        if this.value is not None and node[step] != this.value:
            return Problem(f"{this.key} is {node[step]!r}, so nothing was deleted", where=this.where)
        del node[step]
        _forget(places, this.key)
        places[this.key] = Place(this.where, whole=False)
        return None
    if not exists and needed:
        return _absent(this, places, known)
    adds_another = exists and node[step] is not None and not isinstance(this.value, dict | list)
    of_another_file = by_default and later  # a fork may have added the key to its file since, or not yet
    if this.action == "add" and adds_another and not of_another_file and not _alike(node[step], this.value):
        fix = f"without the + it is replaced: {this.text.lstrip('+')}"
        return Problem(f"{this.key} is there already", where=this.where, fix=fix)
    if exists and isinstance(node[step], dict) and isinstance(this.value, dict):
        _merge(node[step], this.value)
    else:
        node[step] = this.value
        _forget(places, this.key)
    places.update(places_of_value(this.key, this.value, this.where))
    return None


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _alike(one: Any, other: Any) -> bool:
    """Return True for a value that is there already, such as that of an argument given twice."""
    return type(one) is type(other) and bool(one == other)


def _enter(node: dict[str, Any] | list[Any], part: str) -> Any:
    """The index that ``part`` is in ``node``; None when it is not one of a list's."""
    if isinstance(node, dict):
        return part
    return int(part) if part.isdecimal() and int(part) < len(node) else None


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _forget(places: dict[str, Place], key: str) -> None:
    """Drop the places of ``key`` and of all below it: that value is gone."""
    below = f"{key}."
    for name in [name for name in places if name == key or name.startswith(below)]:
        del places[name]


def _absent(this: Assignment, places: dict[str, Place], known: KnownKeys | None) -> Problem:
    if known is not None:
        what, fix = known.absent(this.key, this.text)
        return Problem(what, where=this.where, fix=fix)
    fix = did_you_mean(this.key, list(places))
    if this.action == "set":
        fix = f"{fix + ' ' if fix.startswith('did') else ''}A new key needs a +: +{this.text}"
    return Problem(f"{this.key} is not there", where=this.where, fix=fix)
