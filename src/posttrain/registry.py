"""Names to things, found without importing them: every extension point of the package is a row at the end of this file.

A registry belongs to a package folder, and the file's name is the name: ``@ADVANTAGES.register("grpo")`` stands in
``algos/advantages/grpo.py``. So the known names can be listed without importing torch, and only the chosen one is loaded.
Beside those stand the names of plug-ins (``model.external_modules``) and a user's own files, by their path.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.descriptions import (
    Description,
    Registration,
    describe_object,
    describe_source,
    registrations,
    registrations_in,
)
from posttrain.errors import ConfigError, MissingDependency, Problem, RequestError, UnknownName, did_you_mean
from posttrain.facts import (
    AdvantageFacts,
    DivergenceFacts,
    EnvFacts,
    LossFacts,
    NoFacts,
    RewardFacts,
    RolloutEngineFacts,
    ToolFacts,
    ToolFormFacts,
    TrackerFacts,
)
from posttrain.settings import Setting, merged
from posttrain.user_files import import_path, module_file, parse_file, source_file
from posttrain.verl_functions import VerlFunction, find, of_trainer, with_columns

T = TypeVar("T")
F = TypeVar("F")

# The package extra that brings a third-party library, by the library's import name, where the two names differ.
EXTRAS = {
    "bitsandbytes": "qlora",
    "bm25s": "search",
    "httpx2": "http",
    "langdetect": "ifeval",
    "liger_kernel": "liger",
    "llguidance": "grammar",
    "math_verify": "math",
    "google.protobuf": "tinker",
    "peft": "lora",
    "reasoning_gym": "tasks",
    "s3fs": "s3",
    "skyrl_gym": "skyrl-gym",
    "starlette": "serve",
    "textual": "show",
    "uvicorn": "serve",
    "zmq": "gkd",
}
# Module that loads functions written for verl; it needs torch.
VERL_LOADER = "posttrain.algos.verl.functions"
# Module that checks each call of a user's own function; it needs torch, too.
OWN_CHECKS = "posttrain.algos.own_functions"
# Registries whose functions it checks, and the section that names one
SECTIONS = {
    "ADVANTAGES": "advantage",
    "POLICY_LOSSES": "loss",
    "DIVERGENCES": "distillation.divergence",
    "TUNE_METHODS": "method",
}
_REGISTERED = re.compile(r'\.register\(\s*"([^"]+)"')  # the name of a decorator
TOOL_EXTRAS = ("browser", "demo", "dev", "docs")  # extras for work on the package itself


class Registry(Generic[F]):
    """Names of one kind of thing (an advantage, a reward, a backend) with what they stand for.

    Args: ``kind`` is the word used in errors; ``package`` is the dotted name of the folder that holds one file per name;
        ``facts`` is the dataclass of what a name states about itself where it is registered.
    """

    def __init__(self, kind: str, package: str, facts: type[F]):
        self.kind = kind
        self.package = package
        self._facts = facts
        self._entries: dict[str, Any] = {}
        self._stated: dict[str, F] = {}
        self._plugged: dict[str, _Plugged] = {}
        self._read: dict[str, Description[F]] = {}

    def register(self, name: str, **facts: Any) -> Callable[[T], T]:
        """Decorator: register what it decorates as ``name``, with facts about it (fields of the registry's facts)."""
        stated = self._facts(**facts)

        def add(entry: T) -> T:
            self._entries[name] = entry
            self._stated[name] = stated
            return entry

        return add

    def names(self) -> list[str]:
        """Every known name, sorted. Imports nothing but the (empty) package itself."""
        return sorted(_files_of(self.package) | set(self._entries) | set(self._plugged))

    def is_built_in(self, name: str) -> bool:
        """True for a name of this package's own; False for a plug-in's, and for an unknown one."""
        return name in _files_of(self.package)

    def get(self, name: str, path: str | None = None) -> Any:
        """The thing called ``name``, or the function of that name in the user's file at ``path``; its module is imported now. An
        algorithm that is not built in comes with a check of each call.

        Raises: UnknownName, listing the known names; MissingDependency when the library it stands on is not installed;
            ConfigError when the user's file cannot be imported.
        """
        if path is not None:
            if self.written_for_verl(name, path):
                return importlib.import_module(VERL_LOADER).load(path, name)
            return self._checked(self._own(name, path), name, path)
        if name not in self._entries:
            if name not in self.names():
                raise UnknownName(self.problem(name))
            plugged = self._plugged.get(name)
            try:
                importlib.import_module(plugged.module if plugged else f"{self.package}.{name}")
            except ModuleNotFoundError as error:
                library = (error.name or "").split(".")[0]
                if library in ("", "posttrain"):
                    raise
                raise MissingDependency(missing_library(library, f"{self.kind} {name}")) from error
        return self._entries[name] if self.is_built_in(name) else self._checked(self._entries[name], name)

    def _own(self, name: str, path: str) -> Any:
        """The function in a user's file. Raises: ConfigError, at the keys that name it."""
        try:
            found = getattr(import_path(path), name, None)
            if not callable(found):
                raise ConfigError(Problem(f"{name!r} in {path} is not a function", field="name"))
        except ConfigError as error:
            section = SECTIONS.get(self._variable())
            at = [replace(each, field=f"{section}.{each.field}") if section else each for each in error.problems]
            raise ConfigError(at) from error
        return found

    def _checked(self, entry: Any, name: str, path: str | None = None) -> Any:
        """A user's own function with a check of each call, where its kind has one."""
        if (variable := self._variable()) not in SECTIONS:
            return entry
        return importlib.import_module(OWN_CHECKS).checked(entry, variable, self.describe(name, path).inputs)

    def describe(self, name: str, path: str | None = None) -> Description[F]:
        """Inputs, settings and facts of a name, read from its source, so that a request can be checked without importing what
        it names; of one that was registered by running code outside the package, from the object itself.

        Raises: UnknownName; ConfigError when the user's file cannot be read or defines no such function.
        """
        if path is not None:
            return self._describe_own(name, path)
        if name in _files_of(self.package):
            return self._describe_file(name)
        if name in self._entries:
            return describe_object(self._entries[name], self._stated[name])
        if name in self._plugged:
            return self._plugged[name].description
        raise UnknownName(self.problem(name))

    def known(self, name: str, path: str | None = None) -> Description[F]:
        """Describe a name as ``describe``; an unknown name or missing file, reported elsewhere, gives an empty description."""
        try:
            return self.describe(name, path)
        except RequestError:
            return Description(self._facts())

    def facts(self, name: str) -> F:
        """The facts stated where ``name`` is registered; the defaults for an unknown name."""
        return self.known(name).facts

    def settings(self, name: str) -> Mapping[str, Setting]:
        """The keyword-only parameters of the function called ``name``, by name; none for an unknown name."""
        return self.known(name).settings

    def inputs(self, name: str) -> tuple[str, ...]:
        """The positional parameters of the function called ``name``: the tensors it needs; none for an unknown name."""
        return self.known(name).inputs

    def all_settings(self) -> dict[str, Setting]:
        """The settings of all names, each with a meaning that says which names read it."""
        found: dict[str, dict[str, Setting]] = {}
        for name in self.names():
            for key, setting in self.settings(name).items():
                found.setdefault(key, {})[name] = setting
        return {key: merged(by_name) for key, by_name in found.items()}

    def all_inputs(self) -> list[str]:
        """Every input that some built-in function takes, sorted: what the caller of all of them supplies."""
        return sorted({tensor for name in _files_of(self.package) for tensor in self._describe_file(name).inputs})

    def stating(self, fact: str) -> list[str]:
        """The names whose fact of that name is set."""
        return [name for name in self.names() if getattr(self.facts(name), fact)]

    def taking(self, tensor: str) -> list[str]:
        """The names whose function takes the input ``tensor``."""
        return [name for name in self.names() if tensor in self.inputs(name)]

    def problem(self, name: str, field: str = "") -> Problem:
        """The problem to report for a name that is not known."""
        known = self.names()
        return Problem(
            f"there is no {self.kind} called {name!r} (known: {', '.join(known)})",
            fix=did_you_mean(name, known, listed=True),
            field=field,
        )

    def _describe_file(self, name: str) -> Description[F]:
        if name not in self._read:
            self._read[name] = self._read_description(name)
        return self._read[name]

    def _read_description(self, name: str) -> Description[F]:
        for file in _sources(self.package, name):
            for each in registrations(file):
                if each.name == name and each.registry == self._variable():
                    return _description(each, self._facts)
        return Description(self._facts())

    def _describe_own(self, name: str, path: str) -> Description[F]:
        tree = _tree(path, source_file(path, holds=f"your {self.kind}"))
        for each in registrations_in(tree):
            if each.definition.name == name and each.registry == self._variable():
                return _description(each, self._facts)
        if theirs := self.written_for_verl(name, path):
            return self._describe_verl(theirs)
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if name not in functions:
            what = f"{path} defines no function {name!r} (it defines: {', '.join(functions) or 'no function'})"
            raise ConfigError(Problem(what, fix=did_you_mean(name, functions, listed=True), field="name"))
        return describe_source(functions[name], self._facts())

    def written_for_verl(self, name: str, path: str) -> VerlFunction | None:
        """The function for verl that a file has under this name; None for one in our own convention, or none at all."""
        if self._variable() not in ("ADVANTAGES", "POLICY_LOSSES"):
            return None
        try:
            file = source_file(path, holds=f"your {self.kind}")
            found = find(_tree(path, file), name) or of_trainer(file, name)
        except ConfigError:
            return None
        if found is None or found.is_loss != (self._variable() == "POLICY_LOSSES"):
            return None
        return with_columns(found, file)

    def _describe_verl(self, theirs: VerlFunction) -> Description[F]:
        facts = {"compares_responses": True} if theirs.compares_responses and not theirs.is_loss else {}
        return Description(self._facts(**facts), theirs.our_inputs, theirs.settings, optional=theirs.optional)

    def _variable(self) -> str:
        """The name that this registry has in this file; "" for one that is defined elsewhere."""
        return next((name for name, value in globals().items() if value is self), "")

    def plugged(self) -> set[str]:
        """The names that plug-ins register."""
        return set(self._plugged)

    def _plug(self, module: str, each: Registration) -> None:
        self._plugged.setdefault(each.name, _Plugged(module, _description(each, self._facts)))


@dataclass(frozen=True, slots=True)
class _Plugged:
    """A name that a plug-in registers."""

    module: str
    description: Description[Any]


def plug_in(modules: Iterable[str]) -> None:
    """Make the names that plug-ins register known, from their source: nothing is imported before it is used. A module that is
    not installed is passed over: importing it reports it."""
    for module in modules:
        for name, file in _module_sources(module):
            for each in registrations(file):
                registry = globals().get(each.registry)
                if isinstance(registry, Registry):
                    registry._plug(name, each)


def _description(each: Registration, facts: type[F]) -> Description[F]:
    return describe_source(each.definition, facts(**each.facts))


_TREES: dict[tuple[str, int, int], ast.Module] = {}


def _tree(path: str, file: Path) -> ast.Module:
    """The syntax tree of a user's file, parsed again when it has changed."""
    state = file.stat()
    key = str(file), state.st_mtime_ns, state.st_size
    if key not in _TREES:
        _TREES[key] = parse_file(path, file)
    return _TREES[key]


@cache
def _module_sources(module: str) -> tuple[tuple[str, Path], ...]:
    """The modules of a plug-in with their files: of a package, all that are in it."""
    try:
        file = module_file(module, asked=module)
    except ConfigError:
        return ()
    if file.name != "__init__.py":
        return ((module, file),)
    names = ((path, path.relative_to(file.parent).with_suffix("").parts) for path in sorted(file.parent.rglob("*.py")))
    return tuple((".".join([module, *(part for part in parts if part != "__init__")]), path) for path, parts in names)


@cache  # a request asks for them a hundred times
def _files_of(package: str) -> frozenset[str]:
    """The names of a package's modules that register something under their own name, and of its folders."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    modules = list(pkgutil.iter_modules(folders or []))
    return frozenset(name for _, name, folder in modules if folder or _registers(name, _source(f"{package}.{name}")))


def _registers(name: str, source: str) -> bool:
    """Return True when a decorator registers ``name``; the formatter may have broken its line behind the bracket."""
    return name in _REGISTERED.findall(source)


@cache
def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _sources(package: str, name: str) -> Iterator[Path]:
    """The file called ``name``, or the files of that folder that register the name."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        file = Path(folder) / f"{name}.py"
        files = [file] if file.is_file() else sorted((Path(folder) / name).glob("*.py"))
        yield from (file for file in files if _registers(name, file.read_text(encoding="utf-8")))


def is_installed(library: str) -> bool:
    """Tell if a third-party library can be imported, without importing it."""
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # the package that it is a part of
        return False


def optional_libraries() -> dict[str, str]:
    """Every optional library by its import name, with the extra that brings it; as pyproject.toml lists them."""
    from importlib.metadata import metadata  # takes longer to import than the rest of this module

    extras = metadata("posttrain").get_all("Provides-Extra") or []
    named_alike = [extra for extra in extras if extra not in (*EXTRAS.values(), *TOOL_EXTRAS)]
    return dict(sorted((EXTRAS | {extra: extra for extra in named_alike}).items()))


def missing_library(library: str, needed_by: str) -> Problem:
    """The problem to report when ``library`` cannot be imported."""
    extra = optional_libraries().get(library)
    what = f"posttrain[{extra}]" if extra else library
    what, fix = f"{library} is not installed (needed by {needed_by})", f"pip install '{what}'"
    return Problem(what, fix=fix, library=library)


ADVANTAGES = Registry("advantage estimator", "posttrain.algos.advantages", AdvantageFacts)
POLICY_LOSSES = Registry("policy loss", "posttrain.algos.losses", LossFacts)
DIVERGENCES = Registry("divergence", "posttrain.algos.divergences", DivergenceFacts)
TUNE_METHODS = Registry("tuning method", "posttrain.algos.tuning", NoFacts)
REWARDS = Registry("reward", "posttrain.rewards.scorers", RewardFacts)
ENVS = Registry("environment", "posttrain.envs", EnvFacts)
ENV_CHECKS = Registry("environment", "posttrain.plan.environments", NoFacts)
TOOLS = Registry("tool", "posttrain.envs.tools", ToolFacts)
TOOL_FORMS = Registry("form of tool calls", "posttrain.data.tool_forms", ToolFormFacts)
TRAIN_ENGINES = Registry("training engine", "posttrain.backends.train", NoFacts)
ENGINE_PLANS = Registry("training engine", "posttrain.plan.engines", NoFacts)
VALUE_ENGINES = Registry("critic engine", "posttrain.backends.train", NoFacts)
ROLLOUT_ENGINES = Registry("rollout engine", "posttrain.backends.rollout", RolloutEngineFacts)
WEIGHT_SYNCS = Registry("weight sync", "posttrain.backends.weight_sync", NoFacts)
RUNTIMES = Registry("runtime", "posttrain.backends.runtime", NoFacts)
TRACKERS = Registry("tracker", "posttrain.backends.tracking", TrackerFacts)
