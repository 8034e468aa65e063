"""Weights & Biases: https://wandb.ai, a server of one's own, or offline files in RUN_DIR/wandb."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reports could contain data of the run
import wandb  # its import reads the variable above

from posttrain.errors import Problem, RequestError
from posttrain.records.tracked_run import TrackedRun
from posttrain.registry import TRACKERS

COLUMNS = ("sample_id", "data_source", "prompt", "response", "ground_truth", "reward", "stop_reason", "response_tokens")


@TRACKERS.register("wandb", library="wandb")
class Wandb:
    """See interfaces.tracker.Uploader. Reads WANDB_MODE, WANDB_BASE_URL, WANDB_ENTITY and the like."""

    rewinds = False  # an uploaded step is final

    def __init__(self) -> None:
        self._run: wandb.Run | None = None

    def open(self, run: TrackedRun, last_step: int) -> int:
        online = not run.tracking.offline and os.environ.get("WANDB_MODE", "online") == "online"
        if not online:  # the files of a killed process may be incomplete: all steps are written again
            for part in (run.folder / "wandb").glob(f"offline-run-*-{run.run_id}*"):
                shutil.rmtree(part)
        elif not wandb.login(prompt=False):  # a prompt would disturb the run's display on the terminal
            what = "no API key of Weights & Biases is configured"
            raise RequestError(Problem(what, fix="type `wandb login`, or set tracking.offline=true"))
        # The terminal belongs to the run's own display.
        settings = wandb.Settings(console="off", silent=True)
        if run.tracking.proxy:
            settings.https_proxy = run.tracking.proxy
        self._run = wandb.init(
            project=run.tracking.project,
            name=run.name,
            id=run.run_id,
            dir=run.folder,
            config=dict(run.config),
            mode="offline" if run.tracking.offline else None,
            resume="allow" if online else None,
            settings=settings,
        )
        return int(self._run.step) - 1 if online else -1

    def send(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        assert self._run is not None, "open() comes first"
        row: dict[str, Any] = dict(metrics)
        if samples:
            data = [[_plain(sample.get(column)) for column in COLUMNS] for sample in samples]
            row["validation/samples"] = wandb.Table(columns=list(COLUMNS), data=data, allow_mixed_types=True)
        self._run.log(row, step=step, commit=True)

    def close(self, status: str) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if status in ("done", "interrupted") else 1)
            wandb.teardown()  # waits for its other process: offline, finish() returns before the file is written (0.30)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)
