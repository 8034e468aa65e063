"""The ends of a step: saved where that is due, left in the middle when a signal asks to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from posttrain.errors import RunInterrupted
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.clock import Clock
from posttrain.run.stopping import StopSignal
from posttrain.run.timeline import Timeline
from posttrain.run.trackers import Trackers


def due(step: int, every: int | None) -> bool:
    """True if something that is done every so many steps is done after this one; None is never."""
    return every is not None and step % every == 0


def before_updates(checkpoints: Checkpoints, trackers: Trackers, stop: StopSignal) -> Callable[[Clock], None]:
    """A function for steps to call before they change weights: it waits for a checkpoint that is being written from them."""

    def wait(clock: Clock) -> None:
        if checkpoints.saving:
            with clock.phase("checkpoint_wait"):
                finish_save(checkpoints, trackers, stop)

    return wait


def finish_save(checkpoints: Checkpoints, trackers: Trackers, stop: StopSignal) -> None:
    """Wait for a checkpoint that is being written. Raises: RunStopped when it cannot be."""
    with stop.saving():
        saved = checkpoints.wait()
    if saved:
        trackers.message(f"saved {saved}")


@contextmanager
def save_finished(checkpoints: Checkpoints, trackers: Trackers, stop: StopSignal) -> Iterator[None]:
    """However what happens inside ends, a checkpoint that is being written is finished; unless the process has to end at
    once."""
    try:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            try:
                finish_save(checkpoints, trackers, stop)
            except Exception as error:  # noqa: BLE001  # the run ends by what came first, and this is said beside it
                trackers.message(str(error))
            raise
        finish_save(checkpoints, trackers, stop)
    except KeyboardInterrupt:
        checkpoints.give_up()
        raise


def leave_step(
    step: int, save: Callable[[int], object], checkpoints: Checkpoints, trackers: Trackers, stop: StopSignal
) -> NoReturn:
    """End the run in the middle of a step that has changed nothing yet, with the step before saved.

    Raises: RunInterrupted, always; RunStopped when the step before cannot be saved.
    """
    if step == 1:
        raise RunInterrupted(f"stopped by {stop.name} before the first step; start it again to begin") from None
    finish_save(checkpoints, trackers, stop)
    if not checkpoints.holds(step - 1):
        with stop.saving():
            save(step - 1)
    raise RunInterrupted(
        f"stopped by {stop.name} in step {step}, which is made again when the run is started again; what was done "
        f"before is saved as global_step_{step - 1}"
    ) from None


def end_step(
    step: int,
    save: Callable[[int, bool], str],
    trackers: Trackers,
    stop: StopSignal,
    *,
    save_due: bool,
    last: bool,
    background: bool = False,
    timeline: Timeline | None = None,
) -> None:
    """Save what a step has brought, where it is due or a signal asked to stop. With ``background`` it is written while the
    next step begins: the loop gives the clocks of its steps ``before_updates``.

    Args: save writes the state after a step, in the background or not, and returns the checkpoint's name.
    Raises: RunInterrupted after saving, when a signal asked to stop and steps are left.
    """
    stopping = stop.requested  # read once: a signal may come between the save and the end of the step
    if not save_due and not stopping:
        return
    background = background and not stopping and not last
    trackers.phase("checkpoint", step)
    began = time.time()
    with stop.saving():
        saved = save(step, background)
    if timeline:
        timeline.add(step, "checkpoint", began, time.time())
    if not background:
        trackers.message(f"saved {saved}")
    if stopping and not last:
        raise RunInterrupted(f"stopped by {stop.name} after step {step}, saved as {saved}; start it again to resume")
