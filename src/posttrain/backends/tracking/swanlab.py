"""SwanLab: https://swanlab.cn, a server of one's own, or offline files in RUN_DIR/swanlab."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import swanlab

from posttrain.records.tracked_run import TrackedRun
from posttrain.registry import TRACKERS


@TRACKERS.register("swanlab", library="swanlab")
class SwanLab:
    """See interfaces.tracker.Uploader. Reads SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_WORKSPACE and the like."""

    rewinds = False  # an uploaded step is final

    def __init__(self) -> None:
        self._run: swanlab.Run | None = None

    def open(self, run: TrackedRun, last_step: int) -> int:
        mode = "offline" if run.tracking.offline else os.environ.get("SWANLAB_MODE", "online")
        folder = run.folder / "swanlab"
        if mode in ("offline", "local"):  # files of a killed process are unreadable: all steps are written again
            for part in folder.glob(f"run-*-{run.run_id}"):
                shutil.rmtree(part)
            last_step = -1
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            mode=mode,
            project=run.tracking.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            log_dir=str(folder),
            config=dict(run.config),
            # Neither prompt for a key nor capture the terminal, which belongs to the run's own display.
            settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
        )
        return last_step

    def send(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        assert self._run is not None, "open() comes first"
        row: dict[str, Any] = dict(metrics)
        if samples:
            row["validation/samples"] = [_text(sample) for sample in samples]
        self._run.log(row, step=step)

    def close(self, status: str) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(state={"done": "success", "interrupted": "aborted"}.get(status, "crashed"))


def _text(sample: Mapping[str, Any]) -> swanlab.Text:
    caption = f"{sample.get('sample_id')}: reward {sample.get('reward')}, expected {sample.get('ground_truth')}"
    text = f"{sample.get('prompt')}\n-> {sample.get('response')}"
    return swanlab.Text(text.encode(errors="replace").decode(), caption=caption[:200])
