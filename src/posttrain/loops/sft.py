"""Supervised fine-tuning: learn the texts of a file, update by update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.data.text_batches import text_batch
from posttrain.interfaces.loader import StepLoader
from posttrain.interfaces.roles import Learner
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.loops.training import LoopBody, LoopPlan, StepReport, run_steps
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan, UpdatePlan
from posttrain.records.statistics import UpdateStats
from posttrain.records.texts import Text
from posttrain.run.clock import Clock
from posttrain.run.health import WATCHED_SFT
from posttrain.run.lifetime import Run
from posttrain.run.progress import Progress
from posttrain.steps.teachers import ask_teachers
from posttrain.steps.text_loss import mean_loss
from posttrain.steps.update import update

# The mean of -log pi over the learned tokens of the whole step, whatever the micro-batches are.
LOSS = LossPlan(name="cross_entropy", aggregation="token_mean", temperature=1.0)
# The metrics of a supervised update; the policy's other ones compare it with a sampler.
OF_TEACHERS = ("policy/pg_loss", "distillation/divergence")
METRICS = (
    *("policy/loss", "policy/entropy", "policy/grad_norm", "policy/lr", "policy/skipped_updates"),
    "policy/loss_scale",  # of float16 alone
)


def sft_step(learner: Learner, batch: TrainBatch, loss: LossPlan, clock: Clock) -> UpdateStats:
    """One update by maximum likelihood: the gradient of the mean of -log pi(token | text before it) over learned tokens. With
    teachers, of the mean divergence from them at these tokens besides, or instead."""
    plan = UpdatePlan(loss=loss, epochs=1, sequences_per_update=len(batch), on_policy=True)
    if loss.distillation:
        with clock.phase("teachers", total=len(batch)):
            batch = replace(batch, teachers=ask_teachers(batch.sequences, learner.teachers, loss.distillation, {}))
    with clock.phase("update", total=len(batch)):
        return update(learner.policy, batch, plan, clock.advance)


def run(
    learner: Learner,
    loader: StepLoader[Text],
    validation: Sequence[Text],
    progress: Progress,
    plan: LoopPlan,
    run: Run,
    loss: LossPlan = LOSS,
) -> None:
    """The updates of a run, one after the other, with what lies between them; see loops.training.run_steps."""
    policy = learner.policy
    reported = METRICS + OF_TEACHERS if loss.distillation else METRICS

    def step(number: int, clock: Clock) -> StepReport:
        texts = loader.next()
        stats = sft_step(learner, text_batch(texts), loss, clock)
        metrics = {name: stats.metrics[name] for name in reported if name in stats.metrics} | measure(texts, clock)
        metrics["progress/epoch"] = loader.epochs
        return StepReport(
            metrics=metrics, updates=stats.updates, longest=longest_first(texts), if_idle=no_update_message(texts)
        )

    body = LoopBody(
        step=step,
        validate=lambda number, clock: validate(policy, validation, clock),
        watched=WATCHED_SFT,
        samples_place="the training files",
        notices=learner.notices,
        workers_profiler=learner.profiler,
    )
    run_steps(body, progress, plan, run)


def validate(policy: TrainEngine, texts: Sequence[Text], clock: Clock) -> dict[str, float]:
    """The mean loss over the learned tokens of held-out texts; with named sources, of each of them, too."""
    if not texts:
        return {}
    sources = list(dict.fromkeys(text.source for text in texts))
    parts = {source: [text for text in texts if text.source == source] for source in sources}
    with clock.phase("validation_loss", total=len(texts)):
        losses = {source: mean_loss(policy, part, clock.advance) for source, part in parts.items()}
    tokens = {source: sum(int(text.learned.sum()) for text in part) for source, part in parts.items()}
    mean = sum(losses[source] * tokens[source] for source in sources) / sum(tokens.values())
    if sources == [""]:
        return {"validation/loss": losses[""]}
    return {"validation/loss": mean, **{f"validation/{source}/loss": loss for source, loss in losses.items()}}


def measure(texts: Sequence[Text], clock: Clock) -> dict[str, float]:
    """Sizes of a step's texts, and how fast they were learned."""
    tokens = sum(len(text.token_ids) for text in texts)
    return {
        "data/tokens": float(tokens),
        "data/learned_tokens": float(sum(int(text.learned.sum()) for text in texts)),
        "data/length_mean": tokens / len(texts),
        "data/length_max": float(max(len(text.token_ids) for text in texts)),
        "speed/update_tokens_per_s": tokens / clock.metrics()["time/update_s"],
    }


def longest_first(texts: Sequence[Text]) -> list[str]:
    """The names of a step's rows, those with most tokens first."""
    return [text.name for text in sorted(texts, key=lambda text: len(text.token_ids), reverse=True)]


def no_update_message(texts: Sequence[Text]) -> str:
    """Possible causes of a step without an update, and where to look."""
    rows = ", ".join(text.name for text in texts[:3])
    return f"losses or gradients were not finite. Rows of the last step: {rows}, ..."
