"""Keys of the user's own, which no version of a peer has: listed together, and dropped on request.

``--drop-unknown`` drops them all but two kinds, which have to be named in ``posttrain.own_keys``: keys that look like a
misspelling of a known one, and keys about numbers (a count, a size, a coefficient ...), because a run without them may
compute something else than its author's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from posttrain.config import RunConfig
from posttrain.config.base import Section
from posttrain.config.reading.sources import SourceMap
from posttrain.dialects.known import Known
from posttrain.dialects.loaded import Ignored
from posttrain.dialects.value_types import fits
from posttrain.dialects.words import OUR_SECTION
from posttrain.errors import GUESS, Problem

OWN_KEYS = f"{OUR_SECTION}.own_keys"
MISSPELT = 0.8  # least likeness of last names in one section at which --drop-unknown keeps a key

# Words of a key's last name beside which a number changes what a run computes.
COUNTS = {
    *("n", "num", "nums", "number", "numbers", "samples", "rollouts", "trajectories"),
    *("repeat", "repeats", "times", "agent", "agents", "group"),
}
# Words that make it a bound of something, rather than the count itself
BOUNDS = {"max", "min", "total", "limit", "freq"}
# Words that make it a number of devices or processes
MACHINES = {"gpu", "gpus", "npu", "npus", "cpu", "cpus", "device", "devices", "node", "nodes", "worker", "workers"}
# Words that make it a number of processes beside the computation: readers of rows, servers of tools
PROCESSES = {"worker", "workers", "thread", "threads", "proc", "procs", "process", "processes"}
NUMBERS = {
    *COUNTS,
    *("size", "sizes", "batch", "batchsize", "microbatch", "minibatch", "bs", "bsz", "accumulation", "epoch", "epochs"),
    *("coef", "coeff", "coeffs", "coefficient", "lr", "rate", "weight", "weights", "scale", "penalty", "kl", "entropy"),
    *("alpha", "beta", "gamma", "lam", "lambda", "eps", "epsilon", "clip", "clipping", "temperature"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A key of the user's own, with its value and the place where it is written."""

    key: str
    value: Any
    where: str
    of_checkout: bool = False  # a fork's own base file holds it, and the launch does not set it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The handling of all own keys of a configuration."""

    ignored: tuple[Ignored, ...] = ()
    problems: tuple[Problem, ...] = ()
    unsupported: tuple[Problem, ...] = ()  # a run needs them named
    counts: tuple[Own, ...] = ()  # dropped keys that say how many


def settle(
    keys: Sequence[Own],
    known: Known,
    named: Sequence[str],
    *,
    drop: bool,
    holds: Callable[[str, Any], bool] = lambda key, value: False,
    held: Callable[[str], bool] = lambda key: False,
) -> Settled:
    """Drop the keys that may be dropped, and report the others together.

    Args: ``named`` holds the words of ``posttrain.own_keys``: keys, or sections with all that is in them; ``drop`` is
        ``--drop-unknown``; ``holds`` tells whether a known key has a value, ``held`` whether it is written.
    """
    ignored, problems, unsupported = [], [], []
    droppable = [own.key for own in keys if not is_named(own.key, named) and not known.guess(own.key)]
    for own in keys:
        guess = known.guess(own.key)
        what, fix = known.absent(own.key, "")
        if own.of_checkout and not (guess and looks_misspelt(own.key, guess) and not held(guess)):
            ignored.append(_dropped(own, known, "the checkout's own file has it"))
        elif is_named(own.key, named):
            ignored.append(_dropped(own, known, "named in posttrain.own_keys"))
        elif not drop:
            problems.append(Problem(what, fix=fix, where=own.where, field=own.key))
        elif guess and own.value is not None and looks_misspelt(own.key, guess):
            fix = f"{GUESS} {guess}? If it is yours, name it: {_naming([own.key])}"
            problems.append(Problem(what, fix=fix, where=own.where, field=own.key))
        else:
            like = f", although {guess} is like it" if guess else ""
            ignored.append(_dropped(own, known, f"--drop-unknown{like}"))
            theirs = known.ledger.words_of_forks.get(own.key)
            says_the_same = theirs is not None and holds(theirs, own.value)
            if about_a_number(own) and not says_the_same:
                unsupported.append(_to_confirm(own, known))
    if problems and not drop:
        problems = _with_the_way_on(problems, droppable)
    counts = sorted(filter(_is_count, keys), key=lambda own: not BOUNDS.isdisjoint(_words(own.key)))
    return Settled(
        ignored=tuple(ignored), problems=tuple(problems), unsupported=tuple(unsupported), counts=tuple(counts)
    )


def own_keys_of(section: Mapping[str, Any], sources: SourceMap) -> tuple[list[str], list[Problem]]:
    """The list ``own_keys`` of our section in a configuration, and what is wrong with it."""
    listed = section.get("own_keys")
    if isinstance(listed, list) and all(isinstance(key, str) for key in listed):
        return listed, []
    if listed is None:
        return [], []
    return [], [Problem(f"{OWN_KEYS} must be a list of keys", where=sources.where(OWN_KEYS), field=OWN_KEYS)]


def is_named(key: str, named: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in named)


def _dropped(own: Own, known: Known, by: str) -> Ignored:
    return Ignored(
        key=own.key, reason=f"it is yours, not {known.ledger.dialect}'s, and is dropped ({by})", where=own.where
    )


def _with_the_way_on(problems: list[Problem], own: list[str]) -> list[Problem]:
    """The problems; the last of those without another fix says how to continue without the keys."""
    place = max((number for number, problem in enumerate(problems) if not problem.fix), default=None)
    if place is None:
        return problems
    last = problems[place]
    many = f"without these {len(own)} keys" if len(own) > 1 else "without it"
    fix = f"{many}: --drop-unknown, or {_naming(own)}"
    return [*problems[:place], Problem(last.what, fix=fix, where=last.where, field=last.field), *problems[place + 1 :]]


def _naming(keys: Sequence[str]) -> str:
    return f"+{OWN_KEYS}=[{','.join(keys)}]"


def looks_misspelt(key: str, guess: str) -> bool:
    section, _, leaf = key.rpartition(".")
    other_section, _, other = guess.rpartition(".")
    # Two letters of a short name are more than a fifth of it
    swapped = len(leaf) > 3 and sorted(leaf) == sorted(other)
    return section == other_section and (
        swapped or SequenceMatcher(None, leaf, other, autojunk=False).ratio() >= MISSPELT
    )


def drops_any_value(key: str, known: Known) -> bool:
    """Return True for a key that no version has, that is no misspelling of one, and whose name speaks of no number."""
    guess = known.guess(key)
    return known.is_own(key) and not (guess and looks_misspelt(key, guess)) and not speaks_of_a_number(key)


def speaks_of_a_number(key: str) -> bool:
    return not NUMBERS.isdisjoint(_words(key))


def about_a_number(own: Own) -> bool:
    """Return True for a number above zero or below it, under a name that speaks of a count (but of processes), a size or a
    factor."""
    words = _words(own.key)
    numbers = NUMBERS & words
    of_processes = numbers <= COUNTS and not PROCESSES.isdisjoint(words)
    return _is_number(own.value) and float(own.value) != 0 and bool(numbers) and not of_processes


def _is_count(own: Own) -> bool:
    words = _words(own.key)
    return (
        _is_number(own.value) and float(own.value) > 1 and not COUNTS.isdisjoint(words) and MACHINES.isdisjoint(words)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(key: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key.rpartition(".")[2])}


def _to_confirm(own: Own, known: Known) -> Problem:
    beside = _beside(own, known)
    near = f", which stands beside {', '.join(beside)}," if beside else ""
    what = f"{own.key}={own.value}{near} is yours: without it the run may compute something else"
    fix = f"confirm that by name: {_naming([own.key])}"
    theirs = known.ledger.words_of_forks.get(own.key)
    if theirs is not None and known.ledger.find(theirs) is not None:
        meant = f"{known.ledger.dialect}'s key for it is {theirs}={own.value}"
        fix = f"{meant}; or confirm by name that it may go: {_naming([own.key])}"
    return Problem(what, fix=fix, where=own.where, field=own.key)


def _beside(own: Own, known: Known) -> list[str]:
    """Find up to two numbers of the same section whose names share a word with the key."""
    section = own.key.rpartition(".")[0]
    words = _words(own.key) & NUMBERS
    return [
        row.name
        for row in known.ledger.rows
        if row.name.rpartition(".")[0] == section
        and (fits(1, row.type) or fits(0.5, row.type))
        and words & _words(row.name)
    ][:2]


def alone_in_its_group(settled: Settled, config: Section) -> list[Problem]:
    """Refuse groups of one response beside a dropped key that may be the size of groups."""
    if not isinstance(config, RunConfig) or config.rollout.samples_per_prompt != 1:
        return []
    if not config.advantage.about.facts.compares_responses:
        return []
    return [
        Problem(
            f"a group of one has no baseline: {config.advantage.name} compares the responses to a prompt, "
            f"rollout.samples_per_prompt is 1, and your {own.key}={own.value} is dropped",
            fix=f"say how many responses a prompt gets, such as rollout.samples_per_prompt={own.value}",
            field="rollout.samples_per_prompt",
        )
        for own in settled.counts[:1]
    ]
