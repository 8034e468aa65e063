"""Training for programs and notebooks: ``posttrain train``, ``sft`` and ``tune`` as one function."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from posttrain.api.configs import Overrides
from posttrain.api.plans import Configuration, loaded_of
from posttrain.api.runs import Run
from posttrain.cli.beginning import announce, get_ready
from posttrain.cli.hub import with_hub_data
from posttrain.cli.plan import PLANS
from posttrain.cli.plan_plain import remarks
from posttrain.errors import ConfigError, Problem, RequestError

# The module and function that runs each entry.
TRAINS = {
    "train": ("posttrain.build.train", "train_run"),
    "sft": ("posttrain.build.sft", "sft_run"),
    "tune": ("posttrain.build.tune", "tune_run"),
}


def train(
    configuration: Configuration,
    overrides: Overrides = (),
    *,
    allow_config_change: bool = False,
    start_over: bool = False,
) -> Run:
    """Train a model, or resume a run that was stopped: the same files, numbers and checkpoints as the commands ``posttrain
    train``, ``sft`` and ``tune``, by the kind of the configuration.

    Works in a notebook and in a thread. Interrupting it (the stop button, Ctrl-C) saves first and raises RunInterrupted; the
    same call resumes. In a thread there are no signals to hear.

    Args: ``configuration`` and ``overrides`` as in ``plan``; ``allow_config_change`` and ``start_over`` as the options.
    Returns: the run, with its metrics, samples, checkpoints and model.
    Raises: RequestError for what can be seen before the first step; RunStopped; RunInterrupted.
    """
    loaded = loaded_of(configuration, overrides)
    if loaded.entry not in TRAINS:
        raise ConfigError(Problem(f"this is a configuration of posttrain {loaded.entry}, which trains nothing"))
    loaded = checked(loaded)
    loaded = get_ready(loaded)
    module, function = TRAINS[loaded.entry]
    run = getattr(import_module(module), function)
    try:
        folder = run(loaded.config, allow_config_change=allow_config_change, start_over=start_over, say=announce)
    except RequestError as error:
        error.locate(loaded.locate)
        raise
    return Run(folder)


def checked(loaded: Any) -> Any:
    """Check a configuration to run it, and say what is remarkable about it."""
    loaded = with_hub_data(loaded)
    request = import_module(PLANS[loaded.entry]).check_request(loaded, look_at_files=True, to_run=True)
    for line in remarks(request.loaded):
        announce(line)
    return request.loaded
