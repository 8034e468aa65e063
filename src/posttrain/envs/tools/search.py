"""Search in a local collection of texts, by BM25. The sole importer of bm25s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import bm25s

from posttrain.errors import ConfigError, DataError, Problem
from posttrain.interfaces.tool import KEEPS_NOTHING, Tool, parameters
from posttrain.libraries import json_text
from posttrain.registry import TOOLS
from posttrain.settings import PositiveInt

TEXT_KEYS = ("text", "contents")


@TOOLS.register("search", built_once=True, library="bm25s", files=("corpus",))
def search(*, corpus: str, results: PositiveInt = 3, max_characters: PositiveInt = 1000) -> Tool:
    """A tool that finds the passages of a corpus that match a query best.

    Args: corpus, a JSONL file with a ``text`` (or ``contents``, and optionally a ``title``) in every line; results per
        query; max_characters shown of each.
    Raises: ConfigError, or DataError with the invalid line.
    """
    path = Path(corpus).expanduser()
    if not path.is_file():
        raise ConfigError(Problem(f"there is no file {corpus}", fix="name a JSONL file with a text in every line"))
    index, passages = _index(str(path.resolve()), path.stat().st_mtime_ns)
    return Tool(
        name="search",
        description="Finds the passages of a collection of texts that fit a query best.",
        parameters=parameters(query=("string", "words that the passage should hold")),
        run=partial(_find, index=index, passages=passages, results=results, max_characters=max_characters),
        **KEEPS_NOTHING,
    )


@lru_cache(maxsize=4)
def _index(path: str, changed: int) -> tuple[bm25s.BM25, Sequence[str]]:
    """Build the index of a corpus, cached per process (``changed``: the file's modification time)."""
    passages = _passages(Path(path))
    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(passages), show_progress=False), show_progress=False)
    return index, passages


def _passages(path: Path) -> tuple[str, ...]:
    passages = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json_text.loads(line)
            text = next(row[key] for key in TEXT_KEYS if isinstance(row.get(key), str))
        except (ValueError, AttributeError, StopIteration):
            what = f"{path}:{number} is no JSON object with a text"
            raise DataError(Problem(what, fix='write {"text": ...} in every line')) from None
        title = row.get("title")
        passages.append(f"{title}\n{text}" if isinstance(title, str) else text)
    if not passages:
        raise DataError(Problem(f"{path} holds no text", fix='write {"text": ...} in every line'))
    return tuple(passages)


def _find(
    arguments: Mapping[str, Any], *, index: bm25s.BM25, passages: Sequence[str], results: int, max_characters: int
) -> str:
    [words] = bm25s.tokenize([str(arguments["query"])], return_ids=False, show_progress=False)
    best = []
    if known := [word for word in words if word in index.vocab_dict]:
        found, scores = index.retrieve([known], k=min(results, len(passages)), show_progress=False)
        best = [int(place) for place, score in zip(found[0], scores[0], strict=True) if score > 0]
    if not best:
        return "Nothing was found."
    return "\n\n".join(f"[{rank}] {passages[place][:max_characters]}" for rank, place in enumerate(best, start=1))
