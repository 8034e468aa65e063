"""Names to things, found without importing them: every extension point of the package is a row at the end of this file.

A registry belongs to a package folder, and the file's name is the name: ``@ADVANTAGES.register("grpo")`` stands in
``algos/advantages/grpo.py``. So the known names can be listed without importing torch, and only what is chosen is loaded.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar

from posttrain.errors import MissingDependency, Problem, UnknownName, did_you_mean

T = TypeVar("T")

# The package extra that brings a third-party library, by the library's import name.
EXTRAS = {
    "bm25s": "search",
    "deepspeed": "deepspeed",
    "gymnasium": "gymnasium",
    "httpx2": "http",
    "langdetect": "ifeval",
    "liger_kernel": "liger",
    "math_verify": "math",
    "megatron": "megatron",
    "mcp": "mcp",
    "mlflow": "mlflow",
    "peft": "lora",
    "ray": "ray",
    "reasoning_gym": "tasks",
    "s3fs": "s3",
    "skyrl_gym": "skyrl-gym",
    "starlette": "serve",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "textual": "show",
    "uvicorn": "serve",
    "wandb": "wandb",
}


class Registry:
    """Names of one kind of thing (an advantage, a reward, a backend) and how to get at it.

    Args: ``kind`` is the word used in errors; ``package`` is the dotted name of the folder that holds one file per name.
    """

    def __init__(self, kind: str, package: str):
        self.kind = kind
        self.package = package
        self._entries: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: what it decorates is the thing called ``name``."""

        def add(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        """Every known name, sorted. Imports nothing but the (empty) package itself."""
        return sorted(_files_of(self.package) | set(self._entries))

    def get(self, name: str) -> Any:
        """The thing called ``name``; its module is imported now.

        Raises: UnknownName, listing the known names; MissingDependency when the library it stands on is not installed.
        """
        if name not in self._entries:
            if name not in self.names():
                raise UnknownName(self.problem(name))
            try:
                importlib.import_module(f"{self.package}.{name}")
            except ModuleNotFoundError as error:
                library = (error.name or "").split(".")[0]
                if library in ("", "posttrain"):
                    raise
                raise MissingDependency(missing_library(library, f"{self.kind} {name}")) from error
        return self._entries[name]

    def settings(self, name: str) -> tuple[str, ...]:
        """The keyword-only parameters of the function called ``name``: the numbers it takes from the configuration.

        Read from its source, so that a request can be checked without importing what it names; of one that was registered from
        outside the package, from the function itself.
        """
        if name in self._from_outside():
            return self._parameters(name, Parameter.KEYWORD_ONLY)
        return tuple(keyword.arg for function in self._functions(name) for keyword in function.args.kwonlyargs)

    def inputs(self, name: str) -> tuple[str, ...]:
        """The positional parameters of the function called ``name``: the tensors it needs, by name. Found as ``settings``."""
        if name in self._from_outside():
            return self._parameters(name, Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(argument.arg for function in self._functions(name) for argument in function.args.args)

    def _from_outside(self) -> set[str]:
        """Names that were registered and have no file in the package."""
        return set(self._entries) - _files_of(self.package)

    def _parameters(self, name: str, kind: Any) -> tuple[str, ...]:
        parameters = signature(self._entries[name]).parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.kind is kind)

    def _functions(self, name: str) -> Sequence[ast.FunctionDef]:
        """The registered function of the file called ``name``. Raises UnknownName."""
        if name not in _files_of(self.package):
            raise UnknownName(self.problem(name))
        return _registered_in(f"{self.package}.{name}")

    def problem(self, name: str, field: str = "") -> Problem:
        """What to tell a user who asked for a name that is not known."""
        known = self.names()
        return Problem(
            f"there is no {self.kind} called {name!r} (known: {', '.join(known)})",
            fix=did_you_mean(name, known, listed=True),
            field=field,
        )


@cache  # a request asks for them a hundred times
def _files_of(package: str) -> frozenset[str]:
    """The names of a package's modules that register something under their own name, and of its folders."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    modules = list(pkgutil.iter_modules(folders or []))
    return frozenset(
        name for _, name, folder in modules if folder or f'.register("{name}")' in _source(f"{package}.{name}")
    )


@cache
def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


@cache
def _registered_in(module: str) -> Sequence[ast.FunctionDef]:
    """The functions of a module that are registered, from its source."""
    tree = ast.parse(_source(module))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if any("register" in ast.dump(d) for d in function.decorator_list)]


def is_installed(library: str) -> bool:
    """Whether a third-party library can be imported, without importing it."""
    return find_spec(library) is not None


def missing_library(library: str, needed_by: str) -> Problem:
    """The problem to report when ``library`` cannot be imported."""
    what = f"posttrain[{EXTRAS[library]}]" if library in EXTRAS else library
    return Problem(f"{library} is not installed (needed by {needed_by})", fix=f"pip install '{what}'")


ADVANTAGES = Registry("advantage estimator", "posttrain.algos.advantages")
POLICY_LOSSES = Registry("policy loss", "posttrain.algos.losses")
REWARDS = Registry("reward", "posttrain.rewards.scorers")
ENVS = Registry("environment", "posttrain.envs")
TOOLS = Registry("tool", "posttrain.envs.tools")
TRAIN_ENGINES = Registry("training engine", "posttrain.backends.train")
VALUE_ENGINES = Registry("critic engine", "posttrain.backends.train")
ROLLOUT_ENGINES = Registry("rollout engine", "posttrain.backends.rollout")
WEIGHT_SYNCS = Registry("weight sync", "posttrain.backends.weight_sync")
RUNTIMES = Registry("runtime", "posttrain.backends.runtime")
TRACKERS = Registry("tracker", "posttrain.backends.tracking")
