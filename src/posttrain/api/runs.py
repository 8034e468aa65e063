"""A run's folder for programs: metrics as a table, samples, checkpoints, the trained model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.kinds import check_kind, check_step
from posttrain.errors import Problem, RequestError
from posttrain.report.read import RecordedRun, json_rows, read_run

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Run:
    """A run folder, of a run that is finished, at work or stopped. Every property reads the disk again.

    Raises: RequestError when it is not a run folder.
    """

    def __init__(self, folder: str | Path):
        check_kind(folder, (str, Path), "folder", 'write Run("runs/NAME")')
        self.folder = Path(folder)
        self._recorded()

    def __repr__(self) -> str:
        recorded = self._recorded()
        status = recorded.info.get("status", "unknown")
        return f"Run({str(self.folder)!r}: {recorded.steps_done} steps, {status})"

    @property
    def info(self) -> Mapping[str, Any]:
        """The content of run.json: name, start and end, versions, device, status."""
        return self._recorded().info

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as it is saved, in our own keys."""
        return self._recorded().config

    @property
    def metrics(self) -> pyarrow.Table:
        """A row per step: the column step, and a column per metric (float64, null where a step did not log it or it was not
        finite). ``run.metrics.to_pandas()`` where pandas is installed."""
        import pyarrow as pa

        recorded = self._recorded()
        columns: dict[str, Any] = {"step": pa.array(list(recorded.metrics), pa.int64())}
        for name in recorded.metric_names():
            columns[name] = pa.array([values.get(name) for values in recorded.metrics.values()], pa.float64())
        return pa.table(columns)

    def metric(self, name: str) -> dict[int, float | None]:
        """One metric by step, for the steps that logged it. Raises: RequestError, naming a similar one, for an unknown name."""
        check_kind(name, str, "name", 'such as run.metric("reward/mean")')
        recorded = self._recorded()
        names = recorded.metric_names()
        if name not in names:
            from posttrain.errors import did_you_mean

            raise RequestError(Problem(f"no step logged {name}", where=str(self.folder), fix=did_you_mean(name, names)))
        return recorded.series(name)

    def samples(self, step: int) -> list[dict[str, Any]]:
        """The samples of a step, as they are in samples/step_N.jsonl (docs/tracking.md).

        Raises: RequestError when no samples of the step are saved.
        """
        return self._rows(self._recorded().samples, step, "samples")

    def validation_samples(self, step: int) -> list[dict[str, Any]]:
        """The held-out responses after a step; step 0 is before the first update.

        Raises: RequestError when there was no validation after the step.
        """
        return self._rows(self._recorded().validation, step, "held-out responses")

    @property
    def checkpoints(self) -> list[int]:
        """The steps whose checkpoints are in the run's own folder, oldest first."""
        from posttrain.run.checkpoint_folders import steps_in

        folder = self.folder / "checkpoints"
        return steps_in(folder) if folder.is_dir() else []

    def export(self, out: str | Path, step: int | None = None) -> Path:
        """Write the policy of a step (None: the newest valid checkpoint) as a folder that transformers loads. Returns: ``out``.

        Raises: RequestError when there is no valid checkpoint, or ``out`` is not empty.
        """
        from posttrain.run.checkpoint_folders import PREFIX
        from posttrain.run.export import export_checkpoint

        check_kind(out, (str, Path), "out", 'write run.export("my-model")')
        if step is not None:
            check_step(step)
        source = self.folder if step is None else self.folder / "checkpoints" / f"{PREFIX}{step}"
        export_checkpoint(source, Path(out))
        return Path(out)

    def model(self, step: int | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The trained policy of a step (None: the newest valid checkpoint) and its tokenizer, from transformers, in float32 on
        the CPU, ready to generate.

        Raises: RequestError when there is no valid checkpoint.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with tempfile.TemporaryDirectory(prefix="posttrain-model-") as folder:
            exported = str(self.export(Path(folder) / "model", step))
            model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
            return model.eval(), AutoTokenizer.from_pretrained(exported)

    def _recorded(self) -> RecordedRun:
        return read_run(self.folder)

    def _rows(self, files: Mapping[int, Path], step: int, what: str) -> list[dict[str, Any]]:
        check_step(step)
        if step not in files:
            known = ", ".join(map(str, files)) or "none"
            raise RequestError(
                Problem(
                    f"there are no {what} of step {step}", where=str(self.folder), fix=f"steps with {what}: {known}"
                )
            )
        return list(json_rows(files[step], []))
