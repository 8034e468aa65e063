"""What every dialect hands over: the RunConfig, and how to speak about it in the user's own words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config import RunConfig
from posttrain.dialects.sources import SourceMap, same_branch
from posttrain.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration as it was understood.

    ``problems`` lists what is wrong with single keys. While there are any, ``config`` holds the defaults in their place:
    good enough to look at files and report everything together, not to run.
    """

    config: RunConfig
    sources: SourceMap
    dialect: str
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """The same problems with ``field`` turned into ``where``: the user's file, line and key."""
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
                update={"terms": [term.model_copy(update={"path": _home(term.path)}) for term in config.reward.terms]}
            ),
        }
    )


def _home(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path == "~" or (path and path.startswith("~/")) else path
