"""The parts that every training run is built from, whatever it learns: its folder, its checkpoints, its trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.backends.tracking.jsonl import Jsonl
from posttrain.config import TrainingConfig
from posttrain.config.tracking import TrackingConfig
from posttrain.interfaces.tracker import Tracker, Uploader
from posttrain.registry import TRACKERS
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.lifetime import contents, retention
from posttrain.run.lock import only_trainer
from posttrain.run.relay import Relay
from posttrain.run.run_folder import RunFolder
from posttrain.run.save_callback import save_callback
from posttrain.run.trackers import Trackers


@contextmanager
def open_run(
    config: TrainingConfig, *, allow_config_change: bool, start_over: bool
) -> Iterator[tuple[RunFolder, Checkpoints, list[str]]]:
    """The run's folder and checkpoints, locked against every other process, and notes for the user.

    Raises: RequestError when the folder is in use, or holds a run that this config would not continue.
    """
    folder = RunFolder(config)
    rules = config.checkpoint
    folder.check_unused()  # before the locks, which touch the folders
    named_by = ["run.folder", folder.checkpoints_setting]
    with only_trainer(folder.path, folder.checkpoints, named_by=named_by) as notes, save_callback(rules) as after_save:
        checkpoints = Checkpoints(
            folder.checkpoints,
            retention(rules),
            folder.origin,
            contents(rules),
            start_over=start_over,
            on_saved=folder.saved,
            after_save=after_save,
        )
        # First of all: a run killed before its first checkpoint was in its place has one all the same
        checkpoints.tidy(notes.append)
        found = folder.check(
            holds_checkpoint=checkpoints.exist(), allow_config_change=allow_config_change, start_over=start_over
        )
        yield folder, checkpoints, [*notes, *found]


def say_nothing(text: str) -> None:
    """Drop a message: there is no console."""


def as_written(text: str) -> str:
    """Return a message unchanged: the user's names are ours."""
    return text


def run_trackers(config: TrackingConfig, folder: Path, in_words: Callable[[str], str]) -> Trackers:
    """metrics.jsonl, which a run cannot do without, and the trackers of the config.

    Args: in_words, replaces the names of fields in a message by the user's.
    """
    return Trackers([Jsonl(folder)], [tracker(name, folder) for name in config.trackers], in_words)


def tracker(name: str, folder: Path) -> Tracker:
    """A tracker that shows the run itself, or a service, which is sent what is in the run folder."""
    made = TRACKERS.get(name)()
    return Relay(name, made, folder) if isinstance(made, Uploader) else made
