"""Stand-ins for SkyRL's modules while a program that registers an estimator or a loss is imported.

Such a program imports the whole trainer beside its function, which computes with tensors alone. Registering is a no-op: the
configuration finds the function in the source. What stands in for any further name fails when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_PACKAGES = ("skyrl", "skyrl_train")
F = TypeVar("F")


def _registers(*_: Any) -> Callable[[F], F]:
    """Decorator of an estimator or a loss."""
    return lambda function: function


class _Registry:
    @staticmethod
    def register(*_: Any) -> None:
        """No-op."""


_NAMES: dict[str, Any] = {
    "register_advantage_estimator": _registers,
    "register_policy_loss": _registers,
    "AdvantageEstimatorRegistry": _Registry,
    "PolicyLossRegistry": _Registry,
}


class _StandIn(ModuleType):
    def __init__(self, name: str, given: Mapping[str, Any]):
        super().__init__(name)
        self._given = given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = _NAMES.get(name) or self._given.get(name)
        return known or type(name, (), {"__init__": _fail, "__module__": self.__name__})


def _fail(self: Any, *_: Any, **__: Any) -> None:
    kind = type(self)
    raise RuntimeError(f"{kind.__module__}.{kind.__name__} is SkyRL's, which is not called here")


class _Finder(MetaPathFinder, Loader):
    def __init__(self, given: Mapping[str, Any]):
        self._given = given

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a stand-in for a module of SkyRL; None for others."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self._given)

    def exec_module(self, module: ModuleType) -> None:
        """No-op: names are made at their first use."""


@contextmanager
def standing_in(given: Mapping[str, Any]) -> Iterator[None]:
    """Let imports of SkyRL's modules give stand-ins, ``given`` by name where they hold it; afterwards those that were imported
    before are back."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _PACKAGES}
    finder = _Finder(given)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
            del sys.modules[name]
        sys.modules.update(before)
