"""The user's own callback after checkpoints (checkpoint.callback), called in a child process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from posttrain.config.checkpoint import CheckpointConfig
from posttrain.errors import ConfigError, RunStopped
from posttrain.processes.child import Child, ChildFailed

FACTORY = "posttrain.build.checkpoint_callback:make"


class SaveCallback:
    """The class of checkpoint.callback, constructed in a process of its own."""

    def __init__(self, name: str, child: Child):
        self._name = name
        self._child = child

    def __call__(self, step: int, folder: Path) -> None:
        """Call ``on_save`` for a checkpoint that is complete.

        Raises: RunStopped when it raises, ends its process or takes longer than checkpoint.callback_timeout_s.
        """
        try:
            self._child.call({"step": step, "folder": str(folder.resolve())})
        except ChildFailed as error:
            raise RunStopped(
                f"the checkpoint of step {step} is complete, and checkpoint.callback ({self._name}) failed on it: {error}"
            ) from error


@contextmanager
def save_callback(rules: CheckpointConfig) -> Iterator[SaveCallback | None]:
    """Yield the callback, whose process ends with the block; None without one.

    Raises: ConfigError when the class cannot be loaded or constructed.
    """
    if rules.callback is None:
        yield None
        return
    try:
        child = Child(
            FACTORY,
            {"class": rules.callback, "options": rules.callback_options},
            load_s=rules.callback_timeout_s,
            call_s=rules.callback_timeout_s,
            variables=rules.callback_environment_variables,
        )
    except ConfigError as error:
        raise ConfigError([replace(each, field="checkpoint.callback") for each in error.problems]) from error
    try:
        yield SaveCallback(rules.callback, child)
    finally:
        child.close()
