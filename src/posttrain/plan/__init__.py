"""Plans of a run, made without torch: batches, devices, memory, traffic, and checks."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This package, which shares its name with a function of the library: ``posttrain.plan("run.yaml")``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("posttrain.api.plans").plan(*arguments, **options)


sys.modules[__name__].__class__ = _Package
