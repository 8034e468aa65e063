"""A user's checkpoint callback, in the child process that holds it: the handler of calls that ``run.save_callback`` makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf

from posttrain.errors import ConfigError, Problem
from posttrain.libraries.own_code import Calls, load
from posttrain.libraries.verl import modules as verl_modules


def make(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """Construct the class, ``Class(config=...)``, with its settings as a DictConfig. Returns: a call of its ``on_save``.

    Raises: ConfigError when there is no such class, or it has no ``on_save``; any error of the class.
    """
    verl_modules.provide()
    where = setup["class"]
    callback = load(where)(config=OmegaConf.create(setup["options"]))
    if not callable(getattr(callback, "on_save", None)):
        raise ConfigError(Problem(f"{where} has no method on_save", fix="define it"))
    calls = Calls()

    def on_save(call: Mapping[str, Any]) -> None:
        # No object of the trainer is in this process, and the checkpoint is complete before the call.
        given = {"global_step": call["step"], "checkpoint_dir": call["folder"]}
        calls.call(callback.on_save, trainer=None, async_save=False, **given)

    return on_save
