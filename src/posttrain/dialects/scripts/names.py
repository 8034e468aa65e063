"""The names of launch scripts, and of the trainers in them: known without what reads a script."""

from __future__ import annotations

import re

from posttrain.errors import ConfigError, Problem

_ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")
NUMBERED = re.compile(rf"(.+(?:{'|'.join(map(re.escape, _ENDINGS))}))#(\d+)")


class SeveralTrainers(ConfigError):
    """A script calls more than one trainer; ``names`` are the words that choose one each, such as run.sh#2."""

    def __init__(self, problem: Problem, names: tuple[str, ...]):
        super().__init__(problem)
        self.names = names


def is_script(word: str) -> bool:
    """True for run.sh or run.slurm, and for run.sh#2, the second trainer that a script calls."""
    return word.endswith(_ENDINGS) or NUMBERED.fullmatch(word) is not None
