"""Make one mistake at a time in configurations that train, drawn at random, and count how ``posttrain plan`` answers.

    python benchmarks/mistakes.py verl-0.9/ skyrl/ roll/ examples/ --keys 200 --values 200 --seed 1

A misspelt key (letters swapped, left out, doubled or replaced, a plural, another sign for ``_``) should be named, with the key
that was meant; a wrong value (a type, a choice or a range that the key does not take) should be refused at its key, with a
fix. Texts where any text may stand are not drawn, and neither are names that the user chooses. Each answer that is not right
is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from corpus import Launch, dialect_of, launches

from posttrain.cli.keys import find_ledger
from posttrain.cli.plan import PLANS
from posttrain.cli.request import load_request
from posttrain.dialects.ledger import Key, Ledger
from posttrain.dialects.value_types import choices, type_text
from posttrain.errors import Problem, RequestError

BESIDE = {"a": "s", "e": "r", "i": "o", "l": "k", "m": "n", "n": "m", "o": "p", "p": "o", "r": "t", "s": "a", "t": "y"}
DRAWS = 40  # per mistake, until one fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A key that a launch writes: an override, or a line of its file."""

    key: str
    value: Any
    argument: int = -1  # place of the override among the arguments; -1 for a line of the file
    mark: Any = None  # of the file: (start, end) of the key's last name, and of its value


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What plan says."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    entry: str = ""


def places(launch: Launch) -> list[Place]:
    """Every key that a launch writes itself."""
    found = []
    for number, text in enumerate(launch.arguments):
        if match := re.fullmatch(r"\+{0,2}([\w.@/-]+)=(.*)", text, flags=re.S):
            found.append(Place(key=match[1], value=_parsed(match[2]), argument=number))
    if not found and launch.arguments[0].endswith((".yaml", ".yml")):
        node = yaml.compose(Path(launch.arguments[0]).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        found = list(_of_node(node, ""))
    return found


def _of_node(node: yaml.Node | None, above: str) -> Iterator[Place]:
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode) or name.value in ("defaults", "hydra", "<<", "_target_") or name.style:
            continue
        key = f"{above}.{name.value}" if above else name.value
        marks = (name.start_mark.index, name.end_mark.index, value.start_mark.index, value.end_mark.index)
        if isinstance(value, yaml.ScalarNode):
            yield Place(key=key, value=_parsed(value.value) if not value.style else value.value, mark=marks)
        elif isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _of_node(value, key)


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def misspelt(name: str, draw: random.Random) -> str:
    """A last name with one slip."""
    letters = [place for place, letter in enumerate(name) if letter.isalpha()]
    kind = draw.choice(("swap", "drop", "double", "replace", "plural", "sign"))
    place = draw.choice(letters)
    if kind == "swap":
        place = min(place, len(name) - 2)
        return name[:place] + name[place + 1] + name[place] + name[place + 2 :]
    if kind == "drop":
        return name[:place] + name[place + 1 :]
    if kind == "double":
        return name[:place] + name[place] + name[place:]
    if kind == "replace":
        return name[:place] + BESIDE.get(name[place].lower(), "x") + name[place + 1 :]
    if kind == "plural":
        return name[:-1] if name.endswith("s") else f"{name}s"
    return name.replace("_", "-", 1)


def wrong_values(value: Any, row: Key) -> list[str]:
    """Values that a key does not take, as they would be written."""
    said = type_text(row.type)
    takes_text = {"text", "any"} & set(said.split(" | "))
    counts = row.status == "mapped" and not re.search(r"seed|offset|(^|[._])id|port", row.name)
    if isinstance(value, bool):
        return ["maybe", "[1, 2]"]
    if isinstance(value, int):
        wrong = [*(["1.5"] if "float" not in said else []), "-7"] if value > 0 and counts else []
        return ["'a few'", "[[1]]", "{a: 1}", *wrong]
    if isinstance(value, float):
        return ["much", "[[1]]", "{a: 1}", *([".nan", "-3.5"] if counts else [])]
    if isinstance(value, str) and choices(row.type) and not takes_text:
        return ["banana", f"{value}x", "{a: 1}", "17"]
    if isinstance(value, str) and not said.startswith(("any", "section")) and "section" not in said:
        return ["{a: 1}", "[[word]]"]
    if isinstance(value, list):
        return ["{a: 1}", "3.5"]
    return []


def changed(launch: Launch, place: Place, *, name: str = "", value: str | None = None) -> tuple[list[str], Path | None]:
    """The launch's arguments with another last name or value at a place, and the file that was written for it."""
    if place.argument >= 0:
        text = launch.arguments[place.argument]
        key, _, rest = text.partition("=")
        above, dot, leaf = key.rpartition(".")
        if not dot:
            above, leaf = re.fullmatch(r"(\+*)(.*)", key).groups()  # type: ignore[union-attr]
        new = f"{above}{dot}{name or leaf}={rest if value is None else value}"
        return [new if at == place.argument else one for at, one in enumerate(launch.arguments)], None
    file = Path(launch.arguments[0])
    text = file.read_text(encoding="utf-8")
    first, last, start, end = place.mark
    if value is not None:
        text = f"{text[:start]}{value}{text[end:]}"
    else:
        text = f"{text[:first]}{name}{text[last:]}"
    copy = file.with_name(f"mistake_{file.name}")
    copy.write_text(text, encoding="utf-8")
    return [str(copy), *launch.arguments[1:]], copy


def answer(arguments: Sequence[str], dialect: str | None) -> Answer:
    """What ``posttrain plan --here --skip-files`` says."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            loaded = load_request(list(arguments), dialect, here=True, skip_files=True)
            warnings = [*loaded.warnings, *(f"{one.key}: {one.reason}" for one in loaded.ignored)]
            module = import_module(PLANS[loaded.entry])
            module.plan_text(module.check_request(loaded, look_at_files=False))
    except RequestError as error:
        return Answer(problems=error.problems)
    return Answer(problems=list(loaded.unsupported), warnings=warnings, entry=loaded.entry)


def wrong_key(said: Answer, place: Place, name: str) -> str:
    """ "" where a misspelt key is named and the right one suggested; else what is missing."""
    key = ".".join([*place.key.split(".")[:-1], name])
    texts = [*map(str, said.problems), *said.warnings]
    about = [text for text in texts if key in text]
    if not about:
        return f"not named: {' | '.join(texts)[:400]}" if said.problems else "not named"
    if any(f"meant to be {place.key}?" in text for text in about):
        return ""
    guesses = [guess.rstrip("?,;.)") for text in about for guess in re.findall(r"did you mean (\S+)", text)]
    if not any(guess == place.key or place.key.endswith(f".{guess}") for guess in guesses):
        return f"suggests {guesses or 'nothing'}: {about[0][:300]}"
    others = [str(one) for one in said.problems if key not in str(one)]
    return f"also: {others[0][:300]}" if others else ""


def wrong_value(said: Answer, place: Place) -> str:
    """ "" where a wrong value is refused at its key, with a place and a fix, and nothing else is; else what is missing."""
    about = [one for one in said.problems if f"{one.field}.".startswith(f"{place.key}.") or place.key in one.what]
    if not about:
        return f"not named: {' | '.join(map(str, said.problems))[:400]}" if said.problems else "accepted"
    if not about[0].where:
        return f"without a place: {about[0]}"
    if len(said.problems) > len(about):
        return f"also: {next(one for one in said.problems if one not in about)}"[:400]
    return "" if about[0].fix or "must be" in about[0].what else f"without a fix: {about[0]}"


class Draw:
    """Draws launches that train, and mistakes in them."""

    def __init__(self, folders: Sequence[Path], seed: int):
        self.random = random.Random(seed)
        self.folders = folders
        self.found = {folder: self._launches(folder) for folder in folders}
        self.entries: dict[str, str] = {}

    def _launches(self, folder: Path) -> list[Launch]:
        os.chdir(folder)
        if _is_checkout(folder):
            found = [one for one in launches(folder, dialect_of(folder)) if not one.refused and one.arguments]
        else:
            files = [file for file in sorted(folder.glob("*.yaml")) if not re.match(r"\.|roll|verl|skyrl", file.name)]
            found = [Launch(name=file.name, dialect="native", arguments=[str(file)]) for file in files]
        if not found:
            raise SystemExit(f"{folder} holds no launch: is the checkout whole?")
        return found

    def mistakes(self, count: int) -> Iterator[tuple[Launch, Place, Key]]:
        """Launches in turn of their folders, each with a place in it that a table knows."""
        for number in range(count):
            folder = self.folders[number % len(self.folders)]
            os.chdir(folder)
            for _ in range(DRAWS):
                launch = self.random.choice(self.found[folder])
                if not (entry := self._entry(folder, launch)):
                    continue
                ledger = _ledger(_peer(launch), entry)
                found = [(place, row) for place in places(launch) if (row := _row(ledger, place.key)) is not None]
                if not found:
                    continue
                yield launch, *self.random.choice(found)
                break

    def _entry(self, folder: Path, launch: Launch) -> str:
        """The entry point of a launch that trains; "" for another."""
        at = f"{folder} {launch.name}"
        if at not in self.entries:
            said = answer(launch.arguments, _dialect(launch))
            self.entries[at] = "" if said.problems else said.entry
        return self.entries[at]


def _is_checkout(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("verl", "roll")) or any(folder.glob("skyrl*/"))


def _dialect(launch: Launch) -> str | None:
    return None if launch.dialect == "native" else launch.dialect


def _peer(launch: Launch) -> str:
    return launch.dialect.partition("@")[0]


@cache
def _ledger(dialect: str, entry: str = "") -> Ledger:
    ledger: Ledger = find_ledger(dialect)
    return ledger.of(entry) if entry else ledger


def _row(ledger: Ledger, key: str) -> Key | None:
    """The row of a key whose last name is the peer's; None for the user's own names."""
    row = ledger.find(key)
    if row is None or (row.name.endswith(".*") and not row.name.endswith(".**")):
        return None
    return row if row.name.rpartition(".")[2] == key.rpartition(".")[2] or row.name.endswith("**") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="checkouts of peers, or a folder of native files")
    parser.add_argument("--keys", type=int, default=200, help="misspelt keys")
    parser.add_argument("--values", type=int, default=200, help="wrong values")
    parser.add_argument("--seed", type=int, default=0, help="which launches and mistakes are drawn")
    chosen = parser.parse_args()
    draw = Draw([folder.resolve() for folder in chosen.folders], chosen.seed)
    for title, count in (("misspelt keys", chosen.keys), ("wrong values", chosen.values)):
        tallies: Counter[tuple[str, str]] = Counter()
        for launch, place, row in draw.mistakes(count):
            leaf = place.key.rpartition(".")[2]
            if title == "misspelt keys":
                what = misspelt(leaf, draw.random)
                if what == leaf or len(leaf) < 3 or _ledger(_peer(launch)).by_name.get(place.key[: -len(leaf)] + what):
                    continue
                arguments, copy = changed(launch, place, name=what)
                said = wrong_key(_answered(arguments, launch, copy), place, what)
            else:
                options = wrong_values(place.value, row)
                if not options:
                    continue
                what = draw.random.choice(options)
                arguments, copy = changed(launch, place, value=what)
                said = wrong_value(_answered(arguments, launch, copy), place)
            peer = _peer(launch)
            tallies[peer, "tried"] += 1
            tallies[peer, "named"] += not said.startswith(("not named", "accepted"))
            tallies[peer, "right"] += not said or said.startswith("also")
            tallies[peer, "alone"] += not said
            if said:
                print(f"{peer:7} {launch.name}: {place.key} -> {what} (was {place.value!r}): {said}", flush=True)
        print(f"\nseed {chosen.seed}, {title}")
        for peer in sorted({peer for peer, _ in tallies}):
            print(
                f"  {peer:7}",
                ", ".join(f"{tallies[peer, each]} {each}" for each in ("tried", "named", "right", "alone")),
            )
        print(flush=True)


def _answered(arguments: Sequence[str], launch: Launch, copy: Path | None) -> Answer:
    try:
        return answer(arguments, _dialect(launch))
    finally:
        if copy is not None:
            copy.unlink()


if __name__ == "__main__":
    main()
