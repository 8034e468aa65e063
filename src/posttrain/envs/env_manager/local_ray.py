"""Actors and tasks of ray in the calling process: for environments that use ray only to step several at once.

An actor is made when it is first called, so that an unused one costs nothing. As in a process of its own, it has its own
random numbers (Python's and NumPy's), and arguments and results are copies.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np

_numbers = count()
_first: dict[type, _Actor] = {}  # of every class of actors, the first one


class _Result:
    """The outcome of a call, ray's object reference."""

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value, self.error = value, error


class _RandomState:
    """Random numbers of one actor, apart from those of its process."""

    def __init__(self, seed: int) -> None:
        self._states = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())

    @contextmanager
    def used(self) -> Iterator[None]:
        others = random.getstate(), np.random.get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(others[0])
            np.random.set_state(others[1])


class _Method:
    def __init__(self, call: Callable[..., _Result]) -> None:
        self.remote = call

    def options(self, **_: Any) -> _Method:
        return self


class _Actor:
    def __init__(self, kind: type, args: Sequence[Any], named: dict[str, Any]) -> None:
        self._made: Any = None
        self._make = lambda: kind(*args, **named)
        self._random = _RandomState(next(_numbers))
        _first.setdefault(kind, self)

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(lambda *args, **named: self._call(name, args, named))

    def _call(self, name: str, args: Sequence[Any], named: dict[str, Any]) -> _Result:
        def called() -> Any:
            with self._random.used():
                return getattr(self._there(), name)(*_values(args), **named)

        return _outcome(called)

    def _there(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


class _ActorKind:
    """A class of actors, as ``ray.remote`` returns it."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def remote(self, *args: Any, **named: Any) -> _Actor:
        return _Actor(self._kind, copy.deepcopy(_values(args)), copy.deepcopy(named))

    def options(self, **_: Any) -> _ActorKind:
        return self


def make_one_of_each() -> None:
    """Make the first actor of every class that has one. Raises: what its constructor raises."""
    for actor in list(_first.values()):
        with actor._random.used():
            actor._there()


def remote(*given: Any, **options: Any) -> Any:
    """``@ray.remote``, ``@ray.remote(num_cpus=1)`` and ``ray.remote(num_cpus=1)(Class)``."""
    if not given:
        return lambda what: remote(what)
    (what,) = given
    if inspect.isclass(what):
        return _ActorKind(what)
    return _Method(lambda *args, **named: _outcome(lambda: what(*_values(args), **named)))


def get(results: Any, *, timeout: float | None = None) -> Any:
    if isinstance(results, (list, tuple)):
        return [get(each) for each in results]
    if results.error is not None:
        raise results.error
    return results.value


def put(value: Any) -> _Result:
    return _Result(copy.deepcopy(value))


def wait(results: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    return list(results[:num_returns]), list(results[num_returns:])


def init(*_: Any, **__: Any) -> None:
    """No-op: there is no cluster."""


def shutdown(*_: Any, **__: Any) -> None:
    """No-op."""


def kill(*_: Any, **__: Any) -> None:
    """No-op: actors end with their process."""


def is_initialized() -> bool:
    return True


def as_ray() -> ModuleType:
    """Return a module ``ray`` with these functions, and no others."""
    module = ModuleType("ray", "ray's actors in one process (posttrain)")
    for function in (remote, get, put, wait, init, shutdown, kill, is_initialized):
        setattr(module, function.__name__, function)
    return module


def _values(args: Sequence[Any]) -> list[Any]:
    return [get(each) if isinstance(each, _Result) else each for each in args]


def _outcome(call: Callable[[], Any]) -> _Result:
    try:
        value = call()
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return _Result(copy.deepcopy(value))
    except Exception as error:  # noqa: BLE001 - raised where the result is read, as ray does
        return _Result(error=error)


async def _awaited(value: Any) -> Any:
    return await value
