"""Cache of the scores that a server returned, by the content of the request; a resumed run reuses it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

from posttrain.errors import ConfigError, Problem

# run: kept in the run folder; memory: kept while the process lives; off: every response is sent.
Cache = Literal["run", "memory", "off"]

FILE = "reward_cache.sqlite"


class AnswerCache:
    """Scores by key, in memory until ``move_to`` gives the cache a file."""

    def __init__(self) -> None:
        self._connection = _open(":memory:")

    def move_to(self, folder: Path) -> None:
        """Use the file in this folder from now on, created when missing. Scores held in memory are copied into it.

        Raises: ConfigError when the file cannot be read.
        """
        path = folder / FILE
        rows = self._connection.execute("SELECT key, score FROM scores").fetchall()
        try:
            connection = _open(str(path))
            with connection:
                connection.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            fix = "delete it: the scores in it are then requested again"
            raise ConfigError(Problem(f"{path} cannot be used as a cache: {error}", fix=fix)) from error
        self._connection.close()
        self._connection = connection

    def get(self, key: bytes) -> float | None:
        row = self._connection.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, key: bytes, score: float) -> None:
        """Store a score on disk at once: a run may be killed at any instant."""
        with self._connection:
            self._connection.execute("INSERT OR REPLACE INTO scores VALUES (?, ?)", (key, score))


def _open(path: str) -> sqlite3.Connection:
    # The connection is opened in one thread and used in another (background.py).
    connection = sqlite3.connect(path, check_same_thread=False, timeout=30.0)
    connection.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID")
    return connection
