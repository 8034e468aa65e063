"""Event files for TensorBoard in RUN_DIR/tensorboard: ``tensorboard --logdir runs`` shows every run below that folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from posttrain.records.tracked_run import TrackedRun
from posttrain.registry import TRACKERS


@TRACKERS.register("tensorboard", library="tensorboard")
class TensorBoard:
    """See interfaces.tracker.Uploader. Values are float32, as in TensorBoard itself."""

    rewinds = True  # readers drop values of the steps that a new session repeats

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None

    def open(self, run: TrackedRun, last_step: int) -> int:
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        begins = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=last_step + 1, session_log=begins))
        if last_step < 0:
            self._add(0, _text("config", json.dumps(run.config, indent=1, default=str)))
        return last_step

    def send(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        if samples:
            values.append(_text("validation/samples", "\n\n".join(_told(sample) for sample in samples)))
        self._add(step, *values)

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, *values: Summary.Value) -> None:
        assert self._writer is not None, "open() comes first"
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()  # a killed process loses nothing that was sent


def _text(tag: str, text: str) -> Summary.Value:
    """Return a text for the text plugin, which renders Markdown: four spaces make a line literal."""
    literal = "\n".join(f"    {line}" for line in text.splitlines())
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(
        tag=f"{tag}/text_summary",
        metadata=plugin,
        tensor=TensorProto(dtype=DT_STRING, string_val=[literal.encode(errors="replace")]),
    )


def _told(sample: Mapping[str, Any]) -> str:
    head = f"{sample.get('sample_id')}: reward {sample.get('reward')}, expected {sample.get('ground_truth')}"
    return f"{head}\n{sample.get('prompt')}\n-> {sample.get('response')}"
