"""The conversations of an open run on the disk, so that those of a start that was killed are named when the run is resumed.

``conversations.jsonl`` in the run folder has a line when a conversation begins and when it ends. A start that finds lines of an
earlier one compares them with the samples of the steps that the run resumed after.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FILE = "conversations.jsonl"
MOST_KEPT = 10_000  # conversations of earlier starts, the newest


@dataclass(frozen=True, slots=True)
class EarlierConversation:
    """A conversation of an earlier start of the run."""

    name: str
    sample: str  # the episode that it was
    state: str  # as OpenConversation has it
    why: str = ""
    reward: float | None = None


class Journal:
    """The file, and what earlier starts wrote into it. Guarded by its owner's lock.

    Args: saved_step, of the newest checkpoint: later samples are of steps that a resumed run makes again.
    Raises: OSError when the file cannot be read or written.
    """

    def __init__(self, folder: Path, saved_step: int):
        self._samples = [folder / "samples" / f"step_{step}.jsonl" for step in range(1, saved_step + 1)]
        path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._earlier = {each.name: each for each in _read(path)}
        while len(self._earlier) > MOST_KEPT:
            del self._earlier[next(iter(self._earlier))]
        cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self.failure: OSError | None = None  # of a write; nothing is written after it
        self._path = path
        self._out = path.open("ab", buffering=0)  # so that a line is with the system, which a kill does not reach
        if cut:  # a kill in the middle of a line
            self._out.write(b"\n")

    def begun(self, name: str, sample: str) -> None:
        self._earlier.pop(name, None)
        self._write(conversation=name, sample=sample, state="open")

    def ended(self, name: str, state: str, why: str, reward: float | None) -> None:
        self._write(conversation=name, state=state, **({"why": why} if why else {}), reward=reward)

    def lost(self, name: str) -> str:
        """Return why a conversation of an earlier start is not trained on; "" for one that is, and for names that none had."""
        found = self._earlier.get(name)
        if found is None:
            return ""
        if found.state == "open":
            return "it was unfinished when an earlier start of this run ended, and is not trained on"
        if found.state == "scoring":
            return "its environment had not scored it when an earlier start of this run ended: it is not trained on"
        if found.state != "ended":
            return f"it has {found.state} in an earlier start of this run ({found.why or 'no reason is known'})"
        given = self._given.get(found.sample, ())
        if given and (found.reward is None or found.reward in given):
            return ""
        return "its reward had come when an earlier start of this run ended, but no saved step has it: it is not trained on"

    def told(self, name: str) -> str:
        """Return what became of a conversation of an earlier start, a sentence; "" for names that none had."""
        found = self._earlier.get(name)
        if found is None:
            return ""
        return (
            self.lost(name) or f"an earlier start of this run took it with the reward {found.reward}, and trained on it"
        )

    def summary(self) -> str:
        """Return a note for the user about conversations of earlier starts that are lost; "" where there are none."""
        unfinished = [each.name for each in self._earlier.values() if each.state in ("open", "scoring")]
        rewarded = [each.name for each in self._earlier.values() if each.state == "ended" and self.lost(each.name)]
        if not unfinished and not rewarded:
            return ""
        shown = ", ".join([*rewarded, *unfinished][:5])
        return (
            f"conversations of earlier starts that are not trained on: {len(unfinished)} without a reward, {len(rewarded)} with "
            f"one that no saved step has ({shown}{', …' if len(unfinished) + len(rewarded) > 5 else ''}; {FILE} lists all)"
        )

    def close(self) -> None:
        self._out.close()

    @cached_property
    def _given(self) -> Mapping[str, Sequence[Any]]:
        """The rewards with which the saved steps have earlier conversations, by sample: files of a long run are large, and are
        read once."""
        return _rewards(self._samples, {each.sample for each in self._earlier.values() if each.state == "ended"})

    def _write(self, **line: Any) -> None:
        """Append a line, whole or not at all. Sets ``failure`` when it cannot be written."""
        if self._out.closed or self.failure:
            return
        size, left = self._out.seek(0, os.SEEK_END), json.dumps(line).encode() + b"\n"
        try:
            while left:
                left = left[self._out.write(left) :]
        except OSError as error:
            with suppress(OSError):
                self._out.truncate(size)
            self.failure = OSError(error.errno, error.strerror, str(self._path))


def _read(path: Path) -> Iterator[EarlierConversation]:
    """Yield the conversations of a file, in the order of their beginnings. A line that a kill cut is left out."""
    found: dict[str, EarlierConversation] = {}
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            name = line["conversation"]
            if line["state"] == "open":
                found.pop(name, None)
                found[name] = EarlierConversation(name, str(line["sample"]), "open")
            elif name in found:
                why, reward = line.get("why", ""), line.get("reward")
                found[name] = EarlierConversation(name, found[name].sample, line["state"], why, reward)
        except (ValueError, KeyError, TypeError):
            continue
    yield from found.values()


def _rewards(files: Sequence[Path], samples: Collection[str]) -> Mapping[str, Sequence[Any]]:
    """Return the rewards of these samples in the files, by name: what the call gave, or the run's own."""
    found: dict[str, list[Any]] = {}
    for file in files if samples else ():
        if not file.exists():
            continue
        with file.open(encoding="utf-8", errors="replace") as lines:
            for text in lines:
                try:
                    sample = json.loads(text)
                except ValueError:
                    continue
                if (name := sample.get("sample_id")) in samples:
                    terms = sample.get("reward_terms") or {}
                    found.setdefault(name, []).append(terms.get("environment", sample.get("reward")))
    return found
