"""A training loop of one's own: the models of a run, with verbs to sample, to learn and to save."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.configs import Overrides
from posttrain.api.plans import Configuration, loaded_of
from posttrain.errors import ConfigError, Problem, RequestError

if TYPE_CHECKING:
    from posttrain.api.verbs import Sampler, Trainer
    from posttrain.api.work import Work
    from posttrain.config import RunConfig
    from posttrain.records.batches import ShapedBatch
    from posttrain.records.prompts import Prompt
    from posttrain.records.trajectories import ScoredGroup, TrajectoryGroup


class Session:
    """A run whose steps the caller makes; see ``start``.

    Validation, checkpoints, exports, metrics.jsonl, samples and alarms come between the steps, as in ``posttrain train``.
    """

    def __init__(self, work: Work):
        from posttrain.api.verbs import Sampler, Trainer

        self._work = work
        self.sampler: Sampler = Sampler(work)
        self.trainer: Trainer = Trainer(work)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._work.made.run.folder

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps that are left. Everything between two of them is one step: before the next one the
        sampler gets the new weights, and the step is measured and recorded.

        Raises: RunStopped and RunInterrupted, as ``posttrain.train``.
        """
        return self._work.steps()

    def prompts(self) -> list[Prompt]:
        """Draw the prompts of this step from the training files."""
        return self._work.draw()

    def score(
        self, groups: Sequence[TrajectoryGroup], rewards: Sequence[Sequence[float]] | None = None
    ) -> list[ScoredGroup]:
        """Reward the responses of a step: by the configuration's reward, or by ``rewards``, a number for each response of each
        group; nan is an invalid response, which is in no gradient and no baseline. Called again with the same groups, it
        replaces their rewards; with others, it adds them to the step.

        Returns: those of ``groups`` that the configuration's group_filter leaves.
        Raises: RunStopped when too many responses have no valid reward.
        """
        return self._work.score(groups, rewards)

    def batch(self, groups: Sequence[ScoredGroup]) -> ShapedBatch:
        """The responses as tensors: ``rewards`` [B], ``sequences`` and ``scored.valid`` [B], with the log-probs of the trainer's
        models where the update needs them. The last batch of a step is the one that is recorded."""
        return self._work.shape(groups)


@contextmanager
def start(
    configuration: Configuration,
    overrides: Overrides = (),
    *,
    allow_config_change: bool = False,
    start_over: bool = False,
) -> Iterator[Session]:
    """Load what ``posttrain train`` would load, and let the caller make the steps, in the block of ``with``::

        with posttrain.start("run.yaml") as session:
            for step in session.steps():
                groups = session.score(session.sampler.sample(session.prompts()))
                batch = session.batch(groups)
                for mini_batch in session.trainer.mini_batches(batch, my_advantages(batch)):
                    session.trainer.forward_backward(mini_batch)
                    session.trainer.optim_step()

    An interrupted session is resumed by the same call; the caller's own state is not saved. Leaving the loop early (``break``)
    saves what is done, and the same call resumes that as well.

    Args: as of ``posttrain.train``.
    Raises: RequestError for what can be seen before the first step, and for a run whose steps are not the caller's to make
        (a critic, sampling ahead, domains, filters that sample again).
    """
    from posttrain.api.training import checked
    from posttrain.cli.beginning import announce, get_ready

    loaded = loaded_of(configuration, overrides)
    if loaded.entry != "train":
        raise ConfigError(Problem(f"this is a configuration of posttrain {loaded.entry}; a loop of one's own samples"))
    loaded = checked(loaded)
    config: RunConfig = loaded.config
    if problems := list(_not_the_callers(config)):
        error = ConfigError(problems)
        error.locate(loaded.locate)
        raise error
    loaded = get_ready(loaded)
    config = loaded.config

    from posttrain.api.work import LeftEarly, Work
    from posttrain.build.runs import open_run
    from posttrain.build.train import run_scorer, under_way_with

    try:
        opened = open_run(config, allow_config_change=allow_config_change, start_over=start_over)
        with (
            opened as (folder, checkpoints, notes),
            closing(run_scorer(config)) as scorer,
            under_way_with(config, folder, checkpoints, notes, scorer, announce) as made,
        ):
            work = Work(made)
            with work.leaving_steps():
                yield Session(work)
    except LeftEarly as left:
        print(left, file=sys.stderr)
    except RequestError as error:
        error.locate(loaded.locate)
        raise


def _not_the_callers(config: Any) -> Iterator[Problem]:
    """Yield a problem for everything in a configuration that a loop of the caller's does not make."""
    from posttrain.config.roles import needs_values

    trained = "; posttrain.train makes such a run"
    if config.asynchronous.is_on:
        yield Problem("sampling ahead is not for a loop of your own", fix=f"off{trained}", field="asynchronous.mode")
    if config.loss.rollout_correction.proximal != "recompute":
        what = "log-probs interpolated by version are not for a loop of your own"
        yield Problem(what, fix=f"recompute{trained}", field="loss.rollout_correction.proximal")
    if needs_values(config):
        yield Problem("a critic is not for a loop of your own", fix=f"grpo{trained}", field="advantage.name")
    for name in ("weights", "fit"):
        if getattr(config.resampling, name) != "none":
            what = "responses drawn again before the updates are not for a loop of your own"
            yield Problem(what, fix=f"none{trained}", field=f"resampling.{name}")
    if config.data.curriculum is not None:
        yield Problem(
            "a curriculum is not for a loop of your own", fix=f"leave it out{trained}", field="data.curriculum"
        )
    if config.data.domains:
        yield Problem("domains are not for a loop of your own", fix=f"leave them out{trained}", field="data.domains")
    if (strategy := config.group_filter.strategy) in ("refill", "replace", "prefer"):
        what = f"group_filter.strategy = {strategy} samples until a step is full, which is not for a loop of your own"
        yield Problem(what, fix=f"none, drop or mask{trained}", field="group_filter.strategy")
