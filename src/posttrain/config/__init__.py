"""RunConfig and its sections: frozen, validated, free of torch and of I/O.

The classes named here are loaded when they are used: a worker that needs one section does not pay for the schema of a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig, TrainingConfig
    from posttrain.config.sft import SftConfig
    from posttrain.config.tune import TuneConfig

__all__ = ["RunConfig", "SftConfig", "TrainingConfig", "TuneConfig"]

_MODULES = {"RunConfig": "schema", "SftConfig": "sft", "TrainingConfig": "schema", "TuneConfig": "tune"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
