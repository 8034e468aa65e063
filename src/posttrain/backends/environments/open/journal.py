"""The conversations of an open run on the disk, so that those of a start that was killed are named when the run is resumed.

``conversations.jsonl`` in the run folder has a line when a conversation begins and when it ends. A start that finds lines of an
earlier one compares them with the samples of the steps that the run resumed after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "conversations.jsonl"
MOST_KEPT = 10_000  # conversations of earlier starts, the newest


@dataclass(frozen=True, slots=True)
class EarlierConversation:
    """A conversation of an earlier start of the run."""

    name: str
    sample: str  # the episode that it was
    state: str  # open, ended, failed or dropped, as OpenConversation has it
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
        self._out = path.open("a", encoding="utf-8")
        if cut:  # a kill in the middle of a line
            self._out.write("\n")

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
        if found.state != "ended":
            return f"it has {found.state} in an earlier start of this run ({found.why or 'no reason is known'})"
        if _is_in(self._samples, found):
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
        unfinished = [each.name for each in self._earlier.values() if each.state == "open"]
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

    def _write(self, **line: Any) -> None:
        if self._out.closed:
            return
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()  # the system has it, which a kill does not reach


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


def _is_in(samples: Sequence[Path], talk: EarlierConversation) -> bool:
    """Return True when the samples hold the conversation, with its reward where the call gave one."""
    for file in samples:
        if not file.exists():
            continue
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if talk.sample in text and _is_sample(text, talk):
                return True
    return False


def _is_sample(text: str, talk: EarlierConversation) -> bool:
    try:
        sample: Mapping[str, Any] = json.loads(text)
    except ValueError:
        return False
    terms = sample.get("reward_terms") or {}
    given = terms.get("environment", sample.get("reward"))
    return sample.get("sample_id") == talk.sample and (talk.reward is None or given == talk.reward)
