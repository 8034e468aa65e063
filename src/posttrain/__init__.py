"""posttrain: reinforcement-learning post-training for language models.

As a library: ``posttrain.load``, ``plan``, ``train``, ``start`` and ``Run`` (docs/library.md). They are imported when they are
used, so that importing the package loads neither torch nor transformers; their types stand in __init__.pyi.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Plan", "Run", "load", "plan", "start", "train"]

_MODULES = {"Plan": "plans", "Run": "runs", "load": "configs", "start": "session", "train": "training"}


def __getattr__(name: str) -> Any:
    if name == "plan":  # a package that can be called
        return import_module(f"{__name__}.plan")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.api.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
