"""Asynchronous reinforcement learning: the stages of the synchronous loop, on groups whose sampling runs ahead of training."""

from __future__ import annotations

from posttrain.asynchrony.ledger import Bounds
from posttrain.asynchrony.script import Script
from posttrain.errors import RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.loops.rl_plan import AsyncPlan, RunPlan
from posttrain.loops.rl_sync import GroupSource, run_rl
from posttrain.records.plans import StepPlan
from posttrain.records.prompts import Prompt
from posttrain.run.clock import Clock
from posttrain.run.lifetime import Run
from posttrain.run.progress import Progress
from posttrain.run.schedule import Schedule
from posttrain.run.token_values import TokenTexts
from posttrain.steps.ahead import Ahead
from posttrain.steps.measure import asynchrony_metrics
from posttrain.steps.one_step import OneStepAhead
from posttrain.steps.rl_step import StepResult
from posttrain.steps.select import Selection
from posttrain.steps.shape_rewards import RewardState

Sampler = Ahead | OneStepAhead


def sampler_of(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    prompts: dict[str, Prompt],
    plan: RunPlan,
    asynchronous: AsyncPlan,
    script: Script | None = None,
) -> Sampler:
    """The sampler of a mode. Args: prompts of the run, by id; script, recorded decisions to be made again."""
    bounds = Bounds.of(
        asynchronous.staleness_steps,
        groups_per_step=plan.step.prompts,
        total_steps=plan.loop.total_steps,
        max_running=asynchronous.max_running_groups,
        on_stale=asynchronous.on_stale,
    )
    if asynchronous.mode == "one_step":
        return OneStepAhead(
            roles,
            scorer,
            loader,
            prompts,
            bounds,
            plan.step_plan,
            updates_per_step=asynchronous.updates_per_step,
            in_thread=asynchronous.in_thread,
            wait_timeout_s=asynchronous.wait_timeout_s,
        )
    return Ahead(
        roles,
        scorer,
        loader,
        prompts,
        bounds,
        lambda draw: plan.step_plan(draw).sampling,
        wait_timeout_s=asynchronous.wait_timeout_s,
        script=script,
    )


def run(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    rewards: RewardState,
    progress: Progress,
    plan: RunPlan,
    run: Run,
    token_texts: TokenTexts,
    sampler: Sampler,
    script: Script | None = None,
) -> None:
    """The steps of a run, each on the groups that its sampler gives; decisions are written to schedule.jsonl step by step.

    Raises: RunStopped when a step trains on other groups than in the run whose script is followed.
    """
    schedule = Schedule(run.folder, run.first_step)
    sampler.ledger.record = schedule.add

    def sample(number: int, step_plan: StepPlan, clock: Clock) -> Selection:
        schedule.forget()
        return sampler.sample(number, step_plan, clock)

    def end_step(done: StepResult, version: int) -> dict[str, float]:
        if script:
            check_replayed(sampler, script)
        metrics = asynchrony_metrics(
            done.selection.groups,
            done.learned.train,
            done.learned.stats,
            consumed=sampler.consumed,
            steps=sampler.ledger.steps,
            version=version,
        )
        sampler.end_step()
        schedule.flush()
        ledger = sampler.ledger
        if sampler.dropped:
            metrics["async/dropped_length_mean"] = sampler.dropped_tokens / sampler.dropped
        return metrics | {
            "async/late_share": len(sampler.late) / ledger.bounds.groups_per_step,
            "async/groups_ahead": float(len(ledger.pending)),
            "async/groups_running": float(len(ledger.running)),
            "async/dropped_groups": float(ledger.dropped),
            "async/dropped_tokens": float(sampler.dropped_tokens),
            "step/sampled_tokens": float(sampler.sampled_tokens),
        }

    source = GroupSource(
        sample=sample,
        before_sync=sampler.before_sync,
        end_step=end_step,
        sampled_tokens=lambda done: sampler.sampled_tokens,
    )
    run_rl(roles, scorer, loader, rewards, progress, plan, run, token_texts, source)


def check_replayed(sampler: Sampler, script: Script) -> None:
    """Raises: RunStopped when the step under way has trained on other prompts than the recorded one."""
    step = sampler.ledger.steps + 1
    now, before = [entry.prompt_id for entry in sampler.consumed], script.consumed.get(step, [])
    if now != before:
        raise RunStopped(
            f"step {step} trains on {', '.join(now)}, and that of the run that is replayed on {', '.join(before) or 'nothing'}"
        )
