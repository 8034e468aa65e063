"""``posttrain tune``: check the request, then tune on preferences, or train a reward model."""

from __future__ import annotations

from posttrain.cli.errors import stopped_at_once
from posttrain.cli.options import AllowConfigChange, Arguments, Dialect, DropUnknown, Here, StartOver
from posttrain.cli.training import RunOf, train_on_files


def tune(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    allow_config_change: AllowConfigChange = False,
    start_over: StartOver = False,
) -> None:
    """Train a model on preferences in a file (DPO, KTO, ORPO, SimPO), or a reward model."""
    with stopped_at_once():
        from posttrain.cli.plan_tune import check_request
        from posttrain.dialects.entries import TUNE

        train_on_files(
            arguments or [],
            dialect,
            TUNE,
            lambda loaded: check_request(loaded, look_at_files=True, to_run=True).loaded,
            _import_run,
            here=here,
            drop_unknown=drop_unknown,
            allow_config_change=allow_config_change,
            start_over=start_over,
        )


def _import_run() -> RunOf:
    from posttrain.build.tune import tune_run

    return tune_run
