"""A run from its first line to its last: what is written and shown when it begins, and its status however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.checkpoint import CheckpointConfig
from posttrain.errors import RunInterrupted, RunStopped
from posttrain.libraries.disk_errors import NO_PLACE, described, is_of_a_disk
from posttrain.plan.batch import ends_with_epochs
from posttrain.run.checkpoint import Checkpoints, Contents
from posttrain.run.retention import Retention
from posttrain.run.room import checkpoint_room
from posttrain.run.run_folder import RunFolder
from posttrain.run.step_ends import save_finished
from posttrain.run.stopping import GraceOver, StopSignal
from posttrain.run.trackers import Trackers
from posttrain.run.uploads import Uploads


def retention(rules: CheckpointConfig) -> Retention:
    return Retention(
        last=rules.keep_last,
        best=rules.keep_best,
        metric=rules.best_metric,
        mode=rules.best_mode,
        every=rules.keep_every,
    )


def contents(rules: CheckpointConfig) -> Contents:
    return Contents(
        save_optimizer=rules.save_optimizer,
        sharded=rules.sharded,
        load_optimizer=rules.load_optimizer,
        load_schedule=rules.load_schedule,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that is under way: where it writes, saves and reports, and the signal that stops it."""

    folder: Path
    first_step: int
    checkpoints: Checkpoints
    trackers: Trackers
    stop: StopSignal


def begin_run(
    config: TrainingConfig,
    folder: RunFolder,
    checkpoints: Checkpoints,
    trackers: Trackers,
    *,
    first_step: int,
    total_steps: int,
    device: str,
    notes: Sequence[str],
    saved_bytes: int = 0,
    save_steps: Sequence[int] = (),
) -> None:
    """Write what the run is, claim where its checkpoints are copied to, open the trackers and say ``notes``.

    Args: saved_bytes, of a checkpoint; save_steps, after which one is written.
    Raises: RequestError when another run's checkpoints are copied to the same place, or the disk has no room for a checkpoint.
    """
    room = checkpoint_room(
        folder.checkpoints, retention(config.checkpoint), saved_bytes, save_steps, folder.checkpoints_setting
    )
    start_uploads(config.checkpoint, folder, checkpoints, first_step, trackers.message)
    with disk_stops_the_run():
        changes = folder.begin(
            first_step=first_step, total_steps=total_steps, device=device, passed_over=checkpoints.passed_over
        )
        folder.claim_checkpoints()
        trackers.begin(config, total_steps, first_step)
    only_validates = isinstance(config, RunConfig) and config.validation.only
    if only_validates:
        held = "the starting weights" if first_step == 1 else f"the weights after step {first_step - 1}"
        trackers.message(f"validating {held}, and nothing else")
    elif first_step > total_steps:
        done = f"step {first_step - 1} is done and {total_steps} are requested"
        trackers.message(f"nothing is left to do: {done}; raise run.total_steps or run.total_epochs to continue")
    elif first_step > 1:
        trackers.message(f"resuming after step {first_step - 1}")
    for text in [
        *(f"changed since this run was started: {change}" for change in changes),
        *folder.notes,
        *notes,
        *([] if only_validates else ends_with_epochs(config.run, total_steps)),
        *([room] if room else []),
    ]:
        trackers.message(text)


def start_uploads(
    rules: CheckpointConfig, folder: RunFolder, checkpoints: Checkpoints, first_step: int, say: Callable[[str], None]
) -> None:
    """Copy checkpoints to checkpoint.upload while the run continues. Raises: RequestError when another run writes there."""
    url, kept = rules.upload, rules.upload_keep_last
    if url is not None:
        there = retention(rules)
        there = replace(there, last=kept) if kept is not None else there
        uploads = Uploads(url, folder.checkpoints, there, folder.id_from(first_step), say)
        checkpoints.upload_with(uploads, first_step - 1)


@contextmanager
def disk_stops_the_run() -> Iterator[None]:
    """Raises: RunStopped, with the file, where a disk fails or fills up inside."""
    try:
        yield
    except OSError as error:
        if not is_of_a_disk(error) or (error.errno in NO_PLACE and error.filename is None):
            raise
        raise RunStopped(described(error)) from error


@contextmanager
def under_way(
    config: TrainingConfig, folder: RunFolder, checkpoints: Checkpoints, trackers: Trackers, first_step: int
) -> Iterator[Run]:
    """The steps are made inside. However they end, run.json reports it, uploads get their time and the trackers are closed.

    Raises: what the steps raise; where a run was cut short, with the last good checkpoint named.
    """
    wait_s = config.checkpoint.upload_wait_s
    try:
        with StopSignal(config.run.grace_s) as stop, save_finished(checkpoints, trackers, stop), disk_stops_the_run():
            yield Run(folder=folder.path, first_step=first_step, checkpoints=checkpoints, trackers=trackers, stop=stop)
        folder.end("done")
    except RunInterrupted:
        folder.end("interrupted")
        wait_s = min(wait_s, config.run.grace_s)
        raise
    except RunStopped as error:
        folder.end("stopped")
        raise RunStopped(
            f"{error}\nLast good checkpoint: {checkpoints.last_good_name() or 'none was saved'}"
        ) from error
    except GraceOver:
        folder.end("interrupted")
        wait_s = min(wait_s, config.run.grace_s)
        last_good = checkpoints.last_good_name()
        raise RunInterrupted(
            f"stopped after the {config.run.grace_s:g} s of run.grace_s, in the middle of a step, which is done again when "
            f"the run is started again. Last good checkpoint: {last_good or 'none was saved'}"
        ) from None
    except KeyboardInterrupt:
        folder.end("interrupted")
        wait_s = 0.0
        last_good = checkpoints.last_good_name() or "none was saved"
        trackers.message(f"stopped at once, in the middle of a step. Last good checkpoint: {last_good}")
        raise
    except BaseException:
        folder.end("failed")
        raise
    finally:
        checkpoints.finish_uploads(wait_s)
        trackers.close()
