"""The entry points (training, fine-tuning, tuning, generating, evaluating, serving), each with its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from posttrain.config.base import Section
from posttrain.errors import Problem

if TYPE_CHECKING:
    from posttrain.config import RunConfig, SftConfig, TuneConfig
    from posttrain.config.evaluate import EvaluateConfig
    from posttrain.config.generate import GenerateConfig
    from posttrain.config.serve import ServeConfig

C = TypeVar("C", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[C]):
    """One entry point: ``posttrain NAME FILE``. Its configuration and checks are imported when they are used."""

    name: str
    title: str  # what its configuration is called, with an article
    config: str  # "module:class" of its configuration
    checks: str  # module of its checks, each of which gets a configuration whose keys are right one by one

    @property
    def root(self) -> type[C]:
        """The class of its configuration."""
        module, _, name = self.config.partition(":")
        found: type[C] = getattr(import_module(module), name)
        return found

    def check(self, config: C) -> list[Problem]:
        """Find what is wrong between keys."""
        return self._checked("check", config)

    def warnings_of(self, config: C) -> list[str]:
        """Find what has no effect."""
        return self._checked("warnings_of", config)

    def unsupported(self, config: C) -> list[Problem]:
        """Find what is right to ask for and planned."""
        return self._checked("unsupported", config)

    def _checked(self, check: str, config: C) -> list[Any]:
        found: list[Any] = getattr(import_module(self.checks), check)(config)
        return found

    @property
    def schema_file(self) -> str:
        """The name of its JSON schema in docs/."""
        return "posttrain.schema.json" if self.name == "train" else f"posttrain.{self.name}.schema.json"


def schema_line(entry: str) -> str:
    """The first line of a native file, by which editors find the schema beside it."""
    return f"# yaml-language-server: $schema={ENTRIES[entry].schema_file}\n"


TRAIN: Entry[RunConfig] = Entry(
    name="train",
    title="a configuration of reinforcement learning",
    config="posttrain.config.schema:RunConfig",
    checks="posttrain.plan.checks.train",
)
SFT: Entry[SftConfig] = Entry(
    name="sft",
    title="an SFT configuration",
    config="posttrain.config.sft:SftConfig",
    checks="posttrain.plan.checks.sft",
)
TUNE: Entry[TuneConfig] = Entry(
    name="tune",
    title="a tuning configuration",
    config="posttrain.config.tune:TuneConfig",
    checks="posttrain.plan.checks.tune",
)
GENERATE: Entry[GenerateConfig] = Entry(
    name="generate",
    title="a generation configuration",
    config="posttrain.config.generate:GenerateConfig",
    checks="posttrain.config.checks.generate",
)
EVALUATE: Entry[EvaluateConfig] = Entry(
    name="evaluate",
    title="an evaluation configuration",
    config="posttrain.config.evaluate:EvaluateConfig",
    checks="posttrain.config.checks.evaluate",
)
SERVE: Entry[ServeConfig] = Entry(
    name="serve",
    title="an endpoint's configuration",
    config="posttrain.config.serve:ServeConfig",
    checks="posttrain.config.checks.serve",
)

# In the order in which a configuration that could be of several is taken for one.
ENTRIES: dict[str, Entry[Any]] = {entry.name: entry for entry in (TRAIN, SFT, TUNE, GENERATE, EVALUATE, SERVE)}


def entry_of(knows: Callable[[Entry[Any], str], bool], keys: Iterable[str], asked: Entry[Any] | None) -> Entry[Any]:
    """The entry whose configuration has most of these keys, the first of several.

    Args: ``knows`` whether an entry has a key; ``asked`` the entry that the user named, which counts unless another one has
        all of its keys and more: a slip of the finger does not make another configuration.
    """
    written = set(keys)
    known: dict[str, set[str]] = {}
    for entry in ([asked] if asked is not None else []) + list(ENTRIES.values()):
        known[entry.name] = {key for key in written if knows(entry, key)}
        if known[entry.name] == written:  # none has more; reading the keys of all entries takes long
            return entry
    best = max(ENTRIES, key=lambda name: len(known[name]))
    return ENTRIES[best] if asked is None or known[asked.name] < known[best] else asked
