"""Work that is done row by row and must survive a kill: finished rows lie in part files beside the result, and the result is
put together when all are there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.errors import ConfigError, Problem
from posttrain.run.config_change import flat
from posttrain.run.durable import replace_durably, write_durably

REQUEST = "request.json"
MADE_FROM = b"posttrain.generation"  # in the result's metadata: the hash of the request
TEXTS = pa.list_(pa.string())


class Parts:
    """The parts of one result file: rows 0 to n - 1, n to 2n - 1, and so on, each in a file of its own in OUT.parts.

    A part is there whole or not at all. The request, which everything in the result depends on, is kept beside the parts: they
    are never put together with those of another.

    Args: ``request`` plain values; ``rows`` in all, ``rows_per_part`` of them together; ``column`` with the responses;
        ``option``, the setting or option that names the file.
    """

    def __init__(
        self,
        out: Path,
        request: Mapping[str, Any],
        *,
        column: str,
        rows: int,
        rows_per_part: int,
        option: str = "output.file",
    ):
        self.out = out
        self._option = option
        self.folder = parts_folder(out)
        self._request = request
        self._column = column
        self._starts = range(0, rows, rows_per_part)
        self._rows = rows
        self._rows_per_part = rows_per_part

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def _field(self) -> str:
        """The setting that names the file; "" for an option of the command line."""
        return "" if self._option.startswith("-") else self._option

    def rows_of(self, part: int) -> range:
        start = self._starts[part]
        return range(start, min(start + self._rows_per_part, self._rows))

    @property
    def finished(self) -> bool:
        """True if the result is there, made from this very request.

        Raises: ConfigError when the file holds anything else: it is not replaced.
        """
        if not self.out.exists():
            return False
        with suppress(OSError, pa.ArrowException):
            if (pq.read_schema(self.out).metadata or {}).get(MADE_FROM) == self._hash():
                return True
        fix = f"name another {self._option}, or add --overwrite"
        raise ConfigError(
            Problem(f"{self.out} is there already, and not made by this request", fix=fix, field=self._field)
        )

    def check(self) -> None:
        """Raises: ConfigError, with every setting and file that differs, when the parts belong to another request."""
        saved = self._saved()
        if saved is None or saved == self._request:
            return
        before, now = flat(saved), flat(self._request)
        different = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
        fix = f"set it back, name another {self._option}, or begin again with --overwrite"
        raise ConfigError([self._changed(name, before.get(name), now.get(name), fix) for name in different])

    def _changed(self, name: str, before: Any, now: Any, fix: str) -> Problem:
        place = f"the finished rows in {self.folder}"
        for field in ("data.files", "model.path"):  # what these name has another content, or is another
            if name.startswith(f"{field}."):
                what = f"{name.removeprefix(f'{field}.')} has changed since {place} were made"
                return Problem(what, fix=fix, field=field)
        what = f"{place} were made with {name.removeprefix('config.')} {_short(before)}, and this request has {_short(now)}"
        return Problem(what, fix=fix, field=name.removeprefix("config."))

    def begin(self) -> None:
        """Make the folder and keep the request in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._saved() is None:
            write_durably(self.folder / REQUEST, json.dumps(self._request, ensure_ascii=False, indent=1))

    def discard(self) -> None:
        """Remove the result and the parts, whatever they were made from."""
        self.out.unlink(missing_ok=True)
        self.tidy()

    def missing(self) -> list[int]:
        """The parts that are not done, in order. One whose file is damaged counts as not done."""
        return [part for part in range(len(self)) if self._read(part) is None]

    def write(self, part: int, responses: Sequence[Sequence[str]]) -> None:
        """Keep the responses of a part's rows, in order; when this returns they are on the disk."""
        rows = self.rows_of(part)
        assert len(responses) == len(rows)
        table = pa.table({"row": pa.array(rows, pa.int64()), self._column: pa.array(list(responses), TEXTS)})
        replace_durably(self._file(part), partial(pq.write_table, table))

    def responses(self) -> pa.ChunkedArray:
        """The responses of all parts that are done, in order."""
        found = [self._read(part) for part in range(len(self))]
        return pa.chunked_array([column for column in found if column is not None], TEXTS)

    def finish(self, table: pa.Table) -> None:
        """Write the result, ``table`` with the column of responses, and remove the parts. All must be done."""
        responses = self.responses()
        assert len(responses) == table.num_rows, "a part is missing"
        table = table.append_column(self._column, responses).combine_chunks()
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), MADE_FROM: self._hash()})
        replace_durably(self.out, partial(pq.write_table, table))
        self.tidy()

    def tidy(self) -> None:
        """Remove the parts. The folder itself stays as long as it holds something else, such as a lock."""
        (self.folder / REQUEST).unlink(missing_ok=True)
        for part in self.folder.glob("part_*"):
            part.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _read(self, part: int) -> pa.Array | None:
        rows = self.rows_of(part)
        with suppress(OSError, pa.ArrowException, KeyError):
            table = pq.read_table(self._file(part))
            if table["row"].to_pylist() == list(rows) and table.schema.field(self._column).type == TEXTS:
                return table[self._column].combine_chunks()
        return None

    def _file(self, part: int) -> Path:
        return self.folder / f"part_{part:06d}.parquet"

    def _saved(self) -> dict[str, Any] | None:
        """The request that the parts belong to; None where there are none, or none that can be read."""
        with suppress(OSError, ValueError):
            saved = json.loads((self.folder / REQUEST).read_text(encoding="utf-8"))
            return saved if isinstance(saved, dict) else None
        return None

    def _hash(self) -> bytes:
        return hashlib.sha256(json.dumps(self._request, sort_keys=True).encode()).hexdigest().encode()


def parts_folder(out: Path) -> Path:
    """The folder of the parts of a result."""
    return out.with_name(f"{out.name}.parts")


def hashes(files: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each file's content, by its name."""
    found = {}
    for path in files:
        with path.open("rb") as file:
            found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def folder_hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, by its name in it."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: found for path, found in zip(files, hashes(files).values(), strict=True)}


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
