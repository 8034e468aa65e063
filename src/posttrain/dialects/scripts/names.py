"""The names of launch scripts, and of the trainers in them: known without what reads a script."""

from __future__ import annotations

import re

from posttrain.errors import ConfigError, Problem

NUMBERED = re.compile(r"(.+\.sh)#(\d+)")


class SeveralTrainers(ConfigError):
    """A script calls more than one trainer; ``names`` are the words that choose one each, such as run.sh#2."""

    def __init__(self, problem: Problem, names: tuple[str, ...]):
        super().__init__(problem)
        self.names = names


def is_script(word: str) -> bool:
    """True for run.sh, and for run.sh#2, the second trainer that a script calls."""
    return word.endswith(".sh") or NUMBERED.fullmatch(word) is not None
