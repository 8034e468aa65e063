"""MLflow: the server or store of MLFLOW_TRACKING_URI, or the database RUN_DIR/mlflow/mlflow.db."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a local store sends nothing
from mlflow import MlflowClient  # its import reads the variable above
from mlflow.entities import Metric, Param

from posttrain.records.tracked_run import TrackedRun
from posttrain.registry import TRACKERS
from posttrain.run.config_change import flat

RUN_ID = "posttrain.run_id"  # tag by which a run is found
IN_EVERY_STEP = "time/step_s"  # metric that every step has
ENDS = {"done": "FINISHED", "interrupted": "KILLED", "stopped": "FAILED", "failed": "FAILED"}
T = TypeVar("T")
LARGEST_BATCH, LONGEST_PARAM = 100, 500  # limits of every server


@TRACKERS.register("mlflow", library="mlflow")
class Mlflow:
    """See interfaces.tracker.Uploader."""

    rewinds = False  # a repeated step adds a second value

    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._id = ""  # MLflow's id of the run

    def open(self, run: TrackedRun, last_step: int) -> int:
        folder = run.folder.resolve() / "mlflow"
        elsewhere = os.environ.get("MLFLOW_TRACKING_URI")
        if not elsewhere:
            folder.mkdir(parents=True, exist_ok=True)
        client = self._client = MlflowClient(tracking_uri=elsewhere or _database(folder))
        project = client.get_experiment_by_name(run.tracking.project)
        experiment = project.experiment_id if project else client.create_experiment(
            run.tracking.project, artifact_location=None if elsewhere else (folder / "artifacts").as_uri()
        )  # fmt: skip
        found = client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'")
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return max((metric.step for metric in client.get_metric_history(self._id, IN_EVERY_STEP)), default=-1)
        self._id = client.create_run(experiment, run_name=run.name, tags={RUN_ID: run.run_id}).info.run_id
        params = [Param(name_of(key), str(value)[:LONGEST_PARAM]) for key, value in flat(dict(run.config)).items()]
        for some in _batches(params):
            client.log_batch(self._id, params=some)
        client.log_text(self._id, (run.folder / "config.yaml").read_text(encoding="utf-8"), "config.yaml")
        return -1

    def send(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        assert self._client is not None, "open() comes first"
        if samples:
            text = json.dumps(list(samples), ensure_ascii=False, indent=1)
            self._client.log_text(self._id, text.encode(errors="replace").decode(), f"validation/step_{step}.json")
        now = int(time.time() * 1000)
        values = [Metric(name_of(name), value, now, step) for name, value in metrics.items()]
        # The metric that marks a step as sent comes last: a step that was sent partly is sent again.
        values.sort(key=lambda value: value.key == IN_EVERY_STEP)
        for some in _batches(values):
            self._client.log_batch(self._id, metrics=some)

    def close(self, status: str) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._id, ENDS.get(status, "FAILED"))


def _database(folder: Path) -> str:
    """The URI of a database that is made at once: MLflow cannot go on with one whose making was cut off."""
    database = folder / "mlflow.db"
    if not database.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            new = Path(beside) / database.name
            MlflowClient(tracking_uri=f"sqlite:///{new}").search_experiments(max_results=1)
            new.replace(database)
    return f"sqlite:///{database}"


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + LARGEST_BATCH] for start in range(0, len(items), LARGEST_BATCH))


def name_of(metric: str) -> str:
    """Replace characters that MLflow rejects; it allows letters, digits, _ - . : / and spaces. ``@`` becomes ``_at_``."""
    return re.sub(r"[^\w\-.:/ ]", "_", metric.replace("@", "_at_"))
