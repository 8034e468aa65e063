"""Names of models and data sets of the Hugging Face hub, and of their files in its cache. Opens no connection.

A model is ``org/name`` or ``org/name@REVISION`` (a branch, tag or commit). A data set is ``org/name``, ``org/name:SPLIT``,
``org/name/CONFIG:SPLIT`` (each with ``@REVISION`` behind the name), or its files, ``hf://datasets/org/name@REVISION/*.parquet``;
a slice of its rows may follow, ``org/name:train[200:240]`` (row_slices.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.libraries.row_slices import RowSlice, split_slice

MODEL = re.compile(r"(?:hf://(?:models/)?)?(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>\w[\w./-]*))?")
FILES = re.compile(r"hf://datasets/(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w.%-]*))?(?:/(?P<files>.+))?")
ROWS = re.compile(
    r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*?))?(?:/(?P<config>\w[\w.-]*)(?=:))?(?::(?P<split>\w[\w.-]*))?"
)
IN_CACHE = re.compile(
    r"(?:.*/)?(?P<kind>models|datasets)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/(?P<file>.*))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
DATA_KINDS = (".parquet", ".jsonl", ".json", ".csv")
DATASETS = "datasets/"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model or data set of the hub, at a revision, and the part of it that is meant."""

    name: str
    revision: str = ""  # "": the newest of the branch main
    kind: str = "model"  # or dataset
    files: str = ""  # of a data set: a path, or a pattern with * and **
    config: str = ""  # of a data set
    split: str = ""
    # of a data set: of its rows, all files together; None: all
    rows: RowSlice | None = None

    @property
    def key(self) -> str:
        """The name in run.hub_commits."""
        return f"{DATASETS if self.kind == 'dataset' else ''}{self.name}{self.revision and '@' + self.revision}"

    @property
    def title(self) -> str:
        """The name in messages."""
        return f"{'data set ' if self.kind == 'dataset' else ''}{self.name}{self.revision and '@' + self.revision}"

    @property
    def command(self) -> str:
        """The command that downloads it."""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return f"hf download {self.name}{kind}{self.revision and ' --revision ' + self.revision}"


def model_name(text: str) -> HubName | None:
    """Read the name of a model; None for the path of a folder that exists, and for what cannot be one."""
    found = MODEL.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    return HubName(name=found["name"], revision=found["revision"] or "")


def data_name(text: str) -> HubName | None:
    """Read the name of a data set; None for what means a file here."""
    whole, rows = text, None
    if not Path(text).expanduser().exists():
        text, rows = split_slice(text)
    if found := FILES.fullmatch(text):
        revision = (found["revision"] or "").replace("%2F", "/")
        return HubName(kind="dataset", name=found["name"], revision=revision, files=found["files"] or "", rows=rows)
    found = ROWS.fullmatch(text)
    if (
        found is None
        or any(Path(each).expanduser().exists() for each in (whole, text))
        or text.lower().endswith(DATA_KINDS)
    ):
        return None
    if Path(found["name"]).parent.exists():
        return None  # a file that is missing in a folder of the user's
    parts = {part: found[part] or "" for part in ("name", "revision", "config", "split")}
    return HubName(kind="dataset", **parts, rows=rows)


def portable(path: str, commits: Mapping[str, str]) -> str:
    """The hub's name of a path in its cache, without the commit, where ``commits`` (run.hub_commits) has it; else the path."""
    found = IN_CACHE.fullmatch(path)
    if found is None:
        return path
    name = found["name"].replace("--", "/", 1)
    data = DATASETS if found["kind"] == "datasets" else ""
    known = [
        key for key, commit in commits.items() if commit == found["commit"] and key.partition("@")[0] == data + name
    ]
    if not known:
        return path
    if not data:
        return known[0]
    named, at, revision = known[0].partition("@")
    return f"hf://{named}{at}{revision.replace('/', '%2F')}/{found['file'] or ''}"
