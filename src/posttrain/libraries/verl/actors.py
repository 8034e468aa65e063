"""Ray's actors and remote functions for a reward manager that scores by them, in the process of its worker.

A worker of rewards is a killable process with limits of its own, in which no cluster is started: an actor is an object there, and
a remote call is made at once. Its result can be awaited, or handed to ``ray.get``. ``provide_ray`` puts the names in
the place of Ray's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Generator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn


class Result:
    """The outcome of a remote call, which has been made."""

    def __init__(self, call: Callable[[], Any]):
        self._error: Exception | None = None
        try:
            self._value = call()
        except Exception as error:  # noqa: BLE001 - raised where the result is read
            self._error = error

    def read(self) -> Any:
        """Return the value. Raises: what the call raised."""
        if self._error is not None:
            raise self._error
        return self._value

    def __await__(self) -> Generator[None, None, Any]:
        yield
        return self.read()


class _Remote:
    """A class or function behind ``@ray.remote``, or a method of an actor."""

    def __init__(self, made: Callable[..., Any]):
        self._made = made
        self.__name__ = getattr(made, "__name__", "remote")
        self.__doc__ = made.__doc__

    def options(self, **_: Any) -> _Remote:
        """Return the same: resources and places are those of this process."""
        return self

    def remote(self, *positional: Any, **named: Any) -> Any:
        given = [get(each) if isinstance(each, Result) else each for each in positional]
        if isinstance(self._made, type):
            return _Actor(self._made(*given, **named))
        return Result(lambda: self._made(*given, **named))


class _Actor:
    def __init__(self, state: Any):
        self._state = state

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(getattr(self._state, name))


def remote(*made: Any, **_: Any) -> Any:
    """``@ray.remote``, with arguments or without."""
    return _Remote(made[0]) if made else _Remote


def get(results: Any, timeout: float | None = None) -> Any:
    """Return the value of a result, or the values of a list of them."""
    return results.read() if isinstance(results, Result) else [each.read() for each in results]


def wait(results: Sequence[Result], num_returns: int = 1, **_: Any) -> tuple[list[Result], list[Result]]:
    """Return the first results, and the others; all of them are ready."""
    return list(results[:num_returns]), list(results[num_returns:])


def put(value: Any) -> Result:
    return Result(lambda: value)


def kill(actor: Any, **_: Any) -> None:
    """No-op: an actor ends with the worker."""


def init(*_: Any, **__: Any) -> None:
    """No-op: nothing is started."""


def is_initialized() -> bool:
    return True


def get_runtime_context() -> Any:
    return SimpleNamespace(get_node_id=lambda: "0" * 56, gcs_address="")


class Placed:
    """A strategy of placement, which has no effect in one process."""

    def __init__(self, *_: Any, **__: Any):
        pass


_NAMES = (remote, get, wait, put, kill, init, is_initialized, get_runtime_context)
_PLACES = ("NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy")


def calls_ray(source: ast.Module) -> bool:
    """Return True for a file that makes actors or remote functions."""
    uses = (node for node in ast.walk(source) if isinstance(node, ast.Attribute) and node.attr in ("remote", "get"))
    return any(isinstance(use.value, ast.Name) and use.value.id == "ray" for use in uses)


def provide_ray() -> None:
    """Make ``ray`` these names in this process, which runs the user's code."""
    ray, util, strategies = (_module(name) for name in ("ray", "ray.util", "ray.util.scheduling_strategies"))
    for each in _NAMES:
        setattr(ray, each.__name__, each)
    for name in _PLACES:
        setattr(strategies, name, Placed)
    ray.util, util.scheduling_strategies = util, strategies  # type: ignore[attr-defined]
    for module in (ray, util, strategies):
        module.__getattr__ = _lacking(module.__name__)  # type: ignore[method-assign]
        sys.modules[module.__name__] = module


def _module(name: str) -> ModuleType:
    made = ModuleType(name, "A stand-in of posttrain for Ray in a worker of rewards.")
    made.__path__ = []
    return made


def _lacking(module: str) -> Callable[[str], NoReturn]:
    def lacking(name: str) -> NoReturn:
        known = ", ".join(each.__name__ for each in _NAMES)
        raise AttributeError(f"no cluster runs in a worker of rewards, whose {module} has no {name} (it has: {known})")

    return lacking
