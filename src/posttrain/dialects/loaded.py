"""What every dialect hands over: the RunConfig, and how to speak about it in the user's own words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from posttrain.config import RunConfig
from posttrain.dialects.sources import SourceMap, same_branch
from posttrain.errors import ConfigError, Problem


class Words(Protocol):
    """Speaks about our fields in the keys of a dialect."""

    def key(self, field: str) -> str:
        """Their key for our field; "" where they have none."""
        ...

    def translate(self, problems: Iterable[Problem]) -> list[Problem]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A key that was written and has no effect, and why."""

    key: str
    reason: str
    where: str
    asks: bool = True  # it is written with another value than its default


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration as it was understood.

    ``problems`` lists what is wrong with single keys. While there are any, ``config`` holds the defaults in their place:
    good enough to look at files and report everything together, not to run. ``unsupported`` is planned: a plan can be made
    of it, a run is refused. ``words`` is None where the keys are our own.
    """

    config: RunConfig
    sources: SourceMap
    dialect: str
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    unsupported: tuple[Problem, ...] = ()
    changes: tuple[str, ...] = ()  # what --here changed, in sentences
    words: Words | None = None

    def key(self, field: str) -> str:
        """The user's name for one of our fields; ours where theirs has none."""
        return (self.words.key(field) if self.words else "") or field

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """The same problems with ``field`` turned into ``where``: the user's file, line and key."""
        if self.words is not None:
            return self.words.translate(problems)
        return [
            replace(problem, where=self.sources.where(problem.field))
            if problem.field and not problem.where
            else problem
            for problem in problems
        ]

    def further(self, problems: Iterable[Problem]) -> list[Problem]:
        """The same, located, without those about keys that are reported already: they only follow from the default there."""
        reported = [problem.field for problem in self.problems if problem.field]
        return [
            problem
            for problem in self.locate(problems)
            if not any(same_branch(problem.field, field) for field in reported)
        ]

    def runnable(self) -> LoadedConfig:
        """This, when nothing is wrong with it and nothing in it is only planned.

        Raises: ConfigError with every problem.
        """
        if self.problems or self.unsupported:
            raise ConfigError([*self.problems, *self.unsupported])
        return self

    def checked(self) -> LoadedConfig:
        """This, when nothing is wrong with it.

        Raises: ConfigError with every problem.
        """
        if self.problems:
            raise ConfigError(self.problems)
        return self


def expand_home(config: RunConfig) -> RunConfig:
    """``~`` becomes the home folder, in every key that holds a path. Other paths stay relative to the current folder."""
    model, data, reference, run = config.model, config.data, config.reference, config.run
    scorer = config.reward.model
    return config.model_copy(
        update={
            "model": model.model_copy(
                update={name: _home(getattr(model, name)) for name in ("path", "tokenizer_path", "chat_template_file")}
            ),
            "data": data.model_copy(
                update={
                    name: [_home(file) for file in getattr(data, name)] for name in ("train_files", "validation_files")
                }
            ),
            "reference": reference.model_copy(update={"path": _home(reference.path)}),
            "run": run.model_copy(update={"folder": _home(run.folder)}),
            "reward": config.reward.model_copy(
                update={
                    "terms": [term.model_copy(update={"path": _home(term.path)}) for term in config.reward.terms],
                    "model": scorer and scorer.model_copy(update={"path": _home(scorer.path)}),
                }
            ),
        }
    )


def _home(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path == "~" or (path and path.startswith("~/")) else path
