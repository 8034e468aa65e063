"""Known keys that an unknown one may be a misspelling of. A key that says something else is no misspelling, however alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

ALIKE = 0.72  # least likeness of a suggestion
SAME_WORD = 0.5  # least likeness of two words that are one, misspelled
SAME_SECTION = 0.1  # advantage in rank of keys whose section has the name that was written
SAME_PAIR = 0.75  # the same, of a word and two others that may have been joined in it
# Words that say little: with or without them a key means the same.
FILLERS = frozenset(["a", "in", "is", "of", "on", "per", "the", "to", "use", "with"])
FEW = 3  # fewest words of a name that still says what is meant without its last one
LONG = 6  # letters of a word that is known with two of them wrong
MANY = 3  # a last name in more sections than this says nothing without its section


def nearest_keys(key: str, names: Sequence[str], limit: int = 1) -> list[str]:
    """Known keys most like one that is not known; empty when nothing is alike.

    First those that are one slip of the finger away, or say the same words in another order; then those that lack their first
    sections alone, as the table has them. Then the last name counts most, then the whole key: people misspell the name far more
    often than the path, and they remember the name where they forget the path.
    """
    slips = [name for name in names if one_slip(key, name) or _same_words(key, name)]
    slips += [name for name in names if "." in key and name.endswith(f".{key}")]
    if len(slips) >= limit:
        return slips[:limit]
    likeness = _likenesses(key, names)
    best = sorted(likeness, key=lambda name: (-likeness[name] - SAME_SECTION * (_section(name) == _section(key)), name))
    common = Counter(name.rpartition(".")[2] for name in names)
    alike = [
        name for name in best if name not in slips and likeness[name] >= ALIKE and _same_meaning(key, name, common)
    ]
    return [*slips, *alike][:limit]


def one_slip(key: str, name: str) -> bool:
    """True when one letter was left out, added, replaced, or swapped with its neighbour."""
    if abs(len(key) - len(name)) > 1:
        return False
    shorter = min(len(key), len(name))
    start = next((place for place in range(shorter) if key[place] != name[place]), shorter)
    end = next((back for back in range(shorter - start) if key[-1 - back] != name[-1 - back]), shorter - start)
    left, right = key[start : len(key) - end], name[start : len(name) - end]
    return max(len(left), len(right)) == 1 or (len(left) == 2 and left == right[::-1])


def short_of(key: str, name: str) -> bool:
    """True for a name of several words whose last one was left out (overlap_cpu_optimizer_d2h for ..._d2h_h2d), or with two
    letters of one word wrong (parralel)."""
    words, others = key.rpartition(".")[2].split("_"), name.rpartition(".")[2].split("_")
    if len(words) < FEW or key.rpartition(".")[0] != name.rpartition(".")[0]:
        return False
    if words == others[:-1]:
        return True
    wrong = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    return len(words) == len(others) and len(wrong) == 1 and _two_letters(*wrong[0])


def _two_letters(word: str, other: str) -> bool:
    """True for a long word with its own letters in another order, or two of them wrong."""
    if min(len(word), len(other)) < LONG or word[0] != other[0]:
        return False
    return sorted(word) == sorted(other) or _ratio(word, other) >= 1 - 2 / max(len(word), len(other))


def _same_words(key: str, name: str) -> bool:
    """True for a last name of the same section whose words stand in another order: files_train for train_files."""
    section, _, leaf = key.rpartition(".")
    other_section, _, other = name.rpartition(".")
    return section == other_section and leaf != other and sorted(leaf.split("_")) == sorted(other.split("_"))


def _same_meaning(key: str, name: str, common: Counter[str]) -> bool:
    """True when every word of the written last name stands in the other one, and, for a last name that many sections have,
    or is one word, every word of its section, too: clip_ratio_high is not clip_ratio, and one section's path is not
    another's."""
    section, _, leaf = key.rpartition(".")
    other_section, _, other_leaf = name.rpartition(".")
    if not _says_all(leaf, other_leaf):
        return False
    if not section or section == other_section or (common[other_leaf] <= MANY and len(_words(other_leaf)) > 1):
        return True
    return _says_all(section.rpartition(".")[2], other_section.rpartition(".")[2])


def _says_all(written: str, other: str) -> bool:
    """True when each word has a counterpart among the other's, misspelled, joined or divided otherwise."""
    words, others = _words(written), _words(other)
    whole = "".join(others)
    # A word that both have stands for itself alone: log_train is not log_val
    free = [each for each in others if each not in words]
    candidates = [*free, *(left + right for left, right in pairwise(others) if left in free or right in free)]
    return all(
        word in others
        or word in FILLERS
        or (len(word) > 2 and word in whole)
        or any(_ratio(word, one) >= SAME_WORD for one in candidates)
        for word in words
    )


def _words(name: str) -> list[str]:
    """``maxResponse_len2`` -> max, response, len, 2"""
    return [word.lower() for word in re.findall(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+|\d+", name)]


def _ratio(word: str, other: str) -> float:
    return SequenceMatcher(None, word, other, autojunk=False).ratio()


def _likenesses(key: str, names: Sequence[str]) -> dict[str, float]:
    """Half the likeness of the last names, half that of the whole keys, 0 to 1; names whose last part is unlike are left out."""
    leaf = key.rpartition(".")[2]
    last = _ratios(leaf, {name.rpartition(".")[2] for name in names}, at_least=0.5)
    worth = max(last.values(), default=0.0) - 0.3
    alike = {name: ratio for name in names if (ratio := last.get(name.rpartition(".")[2], 0.0)) > worth}
    whole = _ratios(key, alike, at_least=0.3)
    found = {name: 0.5 * ratio + 0.5 * whole.get(name, 0.0) for name, ratio in alike.items()}
    if leaf == key:  # a name without its path: where it is right, the path tells nothing
        found |= {name: 0.9 for name, ratio in alike.items() if ratio == 1}
    return found


def _section(key: str) -> str:
    """``a.actor.lr`` -> actor"""
    return key.rpartition(".")[0].rpartition(".")[2]


def _ratios(word: str, others: Iterable[str], *, at_least: float) -> dict[str, float]:
    """difflib's likeness of a word to others, for those where it reaches a floor."""
    matcher = SequenceMatcher(None, b=word, autojunk=False)  # b is what difflib prepares once
    ratios = {}
    for other in others:
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() >= at_least and matcher.quick_ratio() >= at_least:
            ratios[other] = matcher.ratio()
    return ratios
