"""Scores that a server has given, by what was asked: the same question is not paid for twice, also not by a resumed run."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

from posttrain.errors import ConfigError, Problem

# run: kept in the run folder; memory: as long as the process lives; off: every response is asked about.
Cache = Literal["run", "memory", "off"]

FILE = "reward_cache.sqlite"


class AnswerCache:
    """Scores by key. In memory until ``move_to`` gives it a file."""

    def __init__(self) -> None:
        self._connection = _open(":memory:")

    def move_to(self, folder: Path) -> None:
        """Go on with the file in this folder, which is made when there is none. What is in memory is kept in it.

        Raises: ConfigError when the file cannot be read.
        """
        path = folder / FILE
        rows = self._connection.execute("SELECT key, score FROM scores").fetchall()
        try:
            connection = _open(str(path))
            with connection:
                connection.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            fix = "delete it: what it holds is asked again"
            raise ConfigError(Problem(f"{path} cannot be used as a cache: {error}", fix=fix)) from error
        self._connection.close()
        self._connection = connection

    def get(self, key: bytes) -> float | None:
        row = self._connection.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, key: bytes, score: float) -> None:
        """On the disk at once: a run may be killed at any instant."""
        with self._connection:
            self._connection.execute("INSERT OR REPLACE INTO scores VALUES (?, ?)", (key, score))


def _open(path: str) -> sqlite3.Connection:
    # It is made in one thread and used in another (background.py).
    connection = sqlite3.connect(path, check_same_thread=False, timeout=30.0)
    connection.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID")
    return connection
