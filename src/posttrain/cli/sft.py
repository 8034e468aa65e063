"""``posttrain sft``: check the request, then run supervised fine-tuning."""

from __future__ import annotations

from posttrain.cli.errors import stopped_at_once
from posttrain.cli.options import AllowConfigChange, Arguments, Dialect, DropUnknown, Here, StartOver
from posttrain.cli.training import RunOf, train_on_files


def sft(
    arguments: Arguments = None,
    dialect: Dialect = None,
    drop_unknown: DropUnknown = False,
    here: Here = False,
    allow_config_change: AllowConfigChange = False,
    start_over: StartOver = False,
) -> None:
    """Train a model on the responses in a file (supervised fine-tuning)."""
    with stopped_at_once():
        from posttrain.cli.plan_sft import check_request
        from posttrain.dialects.entries import SFT

        train_on_files(
            arguments or [],
            dialect,
            SFT,
            lambda loaded: check_request(loaded, look_at_files=True, to_run=True).loaded,
            _import_run,
            here=here,
            drop_unknown=drop_unknown,
            allow_config_change=allow_config_change,
            start_over=start_over,
        )


def _import_run() -> RunOf:
    from posttrain.build.sft import sft_run

    return sft_run
