"""The entry points (training, fine-tuning, tuning, generating, evaluating, serving), each with its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from posttrain.config import RunConfig, SftConfig, TuneConfig
from posttrain.config.base import Section
from posttrain.config.checks import evaluate, generate, serve
from posttrain.config.evaluate import EvaluateConfig
from posttrain.config.generate import GenerateConfig
from posttrain.config.serve import ServeConfig
from posttrain.errors import Problem
from posttrain.plan.checks import sft, tune
from posttrain.plan.checks.train import check, unsupported, warnings_of

C = TypeVar("C", bound=Section)


def _nothing(config: Any) -> list[Any]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[C]):
    """One entry point: ``posttrain NAME FILE``.

    ``check`` finds what is wrong between keys, ``warnings_of`` what has no effect, ``unsupported`` what is right to ask for and
    planned. All three get a configuration whose keys are right one by one.
    """

    name: str
    title: str  # what its configuration is called, with an article
    root: type[C]
    check: Callable[[C], list[Problem]] = _nothing
    warnings_of: Callable[[C], list[str]] = _nothing
    unsupported: Callable[[C], list[Problem]] = _nothing

    @property
    def schema_file(self) -> str:
        """The name of its JSON schema in docs/."""
        return "posttrain.schema.json" if self.name == "train" else f"posttrain.{self.name}.schema.json"


def schema_line(entry: str) -> str:
    """The first line of a native file, by which editors find the schema beside it."""
    return f"# yaml-language-server: $schema={ENTRIES[entry].schema_file}\n"


TRAIN = Entry(
    name="train",
    title="a configuration of reinforcement learning",
    root=RunConfig,
    check=check,
    warnings_of=warnings_of,
    unsupported=unsupported,
)
SFT = Entry(
    name="sft",
    title="an SFT configuration",
    root=SftConfig,
    check=sft.check,
    warnings_of=sft.warnings_of,
    unsupported=sft.unsupported,
)
TUNE = Entry(
    name="tune",
    title="a tuning configuration",
    root=TuneConfig,
    check=tune.check,
    warnings_of=tune.warnings_of,
    unsupported=tune.unsupported,
)
GENERATE = Entry(
    name="generate",
    title="a generation configuration",
    root=GenerateConfig,
    check=generate.check,
    warnings_of=generate.warnings_of,
    unsupported=generate.unsupported,
)
EVALUATE = Entry(
    name="evaluate",
    title="an evaluation configuration",
    root=EvaluateConfig,
    check=evaluate.check,
    warnings_of=evaluate.warnings_of,
    unsupported=evaluate.unsupported,
)
SERVE = Entry(
    name="serve",
    title="an endpoint's configuration",
    root=ServeConfig,
    check=serve.check,
    warnings_of=serve.warnings_of,
    unsupported=serve.unsupported,
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
