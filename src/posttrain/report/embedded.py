"""Selection of the samples embedded in a page: the most informative ones within its size, with token values when they fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from posttrain.report.harmless import embed, finite
from posttrain.report.pictures import data_url, picture_files, read_picture
from posttrain.report.read import RecordedRun, json_rows, token_rows

MAX_SAMPLES = 3000  # per page
MAX_SAMPLE_BYTES = 8_000_000  # of samples per page
MAX_TOKEN_BYTES = 6_000_000  # of token values per page
MAX_PICTURE_BYTES = 6_000_000  # of images per page
MAX_SAMPLES_PER_FILE = 500  # leaves room for other steps beside a big validation set
MAX_TEXT_CHARS = 20_000  # per prompt, response, ground truth or turn
TEXT_FIELDS = ("prompt", "response", "ground_truth")
TOKEN_COLUMNS = (
    "token_ids", "sampled", "in_loss", "rollout_logprobs", "gap", "ref_gap", "advantages", "importance_weights", "rejected",
    "versions", "values", "returns", "token_rewards",
)  # fmt: skip


@dataclass(slots=True)
class Embedded:
    """The samples embedded in a page."""

    samples: list[dict[str, Any]] = field(default_factory=list)  # by run, step and kind
    # Per run: token id -> its text.
    token_texts: list[dict[str, str]] = field(default_factory=list)
    # File that samples name -> data URL; its name is its content's
    pictures: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # sentences about data that is not on the page


@dataclass(slots=True)
class _Room:
    """Space left on a page for one run."""

    samples: int
    sample_bytes: int
    token_bytes: int
    picture_bytes: int


def embed_samples(runs: Sequence[RecordedRun], names: Sequence[str], notes: list[str]) -> Embedded:
    """Select samples of the runs, each of which gets an equal share of the page. Unreadable files become ``notes``."""
    found = Embedded()
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        limits = (MAX_SAMPLES, MAX_SAMPLE_BYTES, MAX_TOKEN_BYTES, MAX_PICTURE_BYTES)
        room = _Room(*(limit // len(runs) for limit in limits))
        broken: list[str] = []
        samples, texts, left_out = _of_run(run, room, broken)
        left_out += _add_pictures(samples, run, found.pictures, room)
        prefix = f"{name}: " if len(runs) > 1 else ""
        notes += [prefix + note for note in broken]
        found.samples += [sample | {"run": number} for sample in samples]
        found.token_texts.append(texts)
        if left_out:
            found.left_out.append(prefix + " ".join(left_out))
    if found.left_out:
        found.left_out.append("Everything is in samples/ and validation/ in the run folder.")
    return found


def _of_run(run: RecordedRun, room: _Room, notes: list[str]) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
    """Select a run's samples: newest files first, then the oldest, then ever finer in between; validation and training in turn.

    Returns: samples, texts of token ids, and sentences about what was left out.
    """
    validation = [("validation", step, run.validation[step]) for step in spread(run.validation)]
    training = [("training", step, run.samples[step]) for step in spread(run.samples)]
    files = [item for pair in zip_longest(validation, training) for item in pair if item is not None]
    taken: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    size, whole, cut_files, cut_texts, without_tokens = 0, {"validation": 0, "training": 0}, 0, 0, 0
    for kind, step, path in files:
        count = 0
        token_texts, tokens = token_rows(path)
        for row in json_rows(path, notes):
            row = {key: finite(value) for key, value in row.items()} | {"kind": kind, "step": step}
            cut_texts += _cut_texts(row)
            length = len(embed(row))
            if count == MAX_SAMPLES_PER_FILE or len(taken) == room.samples or size + length > room.sample_bytes:
                cut_files += count > 0
                break
            size += length
            if count in tokens:
                without_tokens += not _add_tokens(row, tokens[count], token_texts, texts, room)
            count += 1
            taken.append(row)
        whole[kind] += count > 0
        if len(taken) == room.samples or size > 0.99 * room.sample_bytes:
            break
    left_out = []
    for kind, total in (("training", len(run.samples)), ("validation", len(run.validation))):
        if whole[kind] < total:
            left_out.append(f"Samples of {whole[kind]} of {total} {kind} steps are on this page.")
    if cut_files:
        left_out.append(f"Of {cut_files} step{'s' * (cut_files > 1)} only the first samples are here.")
    if cut_texts:
        left_out.append(f"{cut_texts} text{'s' * (cut_texts > 1)} longer than {MAX_TEXT_CHARS} characters were cut.")
    if without_tokens:
        left_out.append(f"{without_tokens} sample{'s' * (without_tokens > 1)} are here without their token values.")
    return sorted(taken, key=lambda row: (row["step"], row["kind"])), texts, left_out


def _add_pictures(samples: list[dict[str, Any]], run: RecordedRun, pictures: dict[str, str], room: _Room) -> list[str]:
    """Add the images that samples name to ``pictures``, newest samples first, while there is room. Returns: a sentence about
    missing ones."""
    missing = set()
    for row in reversed(samples):
        for file in picture_files(row):
            if file in pictures or file in missing:
                continue
            content = read_picture(run.folder, file)
            url = data_url(content) if content else ""
            if url and len(url) <= room.picture_bytes:
                room.picture_bytes -= len(url)
                pictures[file] = url
            else:
                missing.add(file)
    return [f"{len(missing)} image{'s' * (len(missing) > 1)} of samples are not on this page."] if missing else []


def _add_tokens(
    row: dict[str, Any], parts: list[dict[str, Any]], token_texts: dict[str, str], texts: dict[str, str], room: _Room
) -> bool:
    """Add a sample's token values to its row, and the texts of new token ids to ``texts``, if there is room."""
    columns = [{name: finite(part[name]) for name in TOKEN_COLUMNS if name in part} for part in parts]
    ids = {str(number) for part in parts for number in part["token_ids"]}
    new = {number: token_texts.get(number, "") for number in sorted(ids) if number not in texts}
    needed = len(embed(columns)) + len(embed(new))
    if needed > room.token_bytes:
        return False
    room.token_bytes -= needed
    row["tokens"] = columns
    texts |= new
    return True


def _cut_texts(row: dict[str, Any]) -> int:
    """Shorten the long texts of a row in place, and convert other values to text. Returns: the number of shortened texts."""
    cut = 0
    turns = row.get("turns")
    if isinstance(turns, list):
        row["turns"] = [dict(turn) for turn in turns if isinstance(turn, dict)]
        for turn in row["turns"]:
            for name, value in turn.items():
                if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
                    turn[name], cut = _shortened(value), cut + 1
    for name in TEXT_FIELDS:
        value = row.get(name)
        text = value if isinstance(value, str) or value is None else json.dumps(value, ensure_ascii=False)
        if text is not None and len(text) > MAX_TEXT_CHARS:
            text, cut = _shortened(text), cut + 1
        row[name] = text
    return cut


def _shortened(text: str) -> str:
    return f"{text[:MAX_TEXT_CHARS]}… [{len(text) - MAX_TEXT_CHARS} more characters in the run folder]"


def spread(steps: Iterable[int]) -> Iterator[int]:
    """Yield the last step, the first, then the middle of each gap, widest first, so that any prefix is evenly spaced."""
    steps = sorted(steps)
    yield from dict.fromkeys(steps[-1:] + steps[:1])
    gaps = [(0, len(steps) - 1)]
    for low, high in gaps:  # grows during the iteration
        if high - low > 1:
            middle = (low + high) // 2
            yield steps[middle]
            gaps += [(low, middle), (middle, high)]
