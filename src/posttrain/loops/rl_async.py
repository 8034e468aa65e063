"""Asynchronous reinforcement learning: the stages of the synchronous loop, on groups whose sampling runs ahead of training."""

from __future__ import annotations

from pathlib import Path

from posttrain.asynchrony.ledger import Bounds
from posttrain.asynchrony.script import Script
from posttrain.errors import RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.loops.rl_plan import AsyncPlan, RunPlan
from posttrain.loops.rl_run import RlRun
from posttrain.loops.rl_sync import GroupSource, run_rl
from posttrain.records.plans import StepPlan
from posttrain.records.prompts import Prompt
from posttrain.run.clock import MAIN, Clock
from posttrain.run.kept_responses import KeptResponses
from posttrain.run.schedule import Schedule
from posttrain.steps.ahead import Ahead
from posttrain.steps.apart import Apart
from posttrain.steps.measure import asynchrony_metrics
from posttrain.steps.one_step import OneStepAhead
from posttrain.steps.open_groups import DIFFERS, OpenGroups, StepEnd
from posttrain.steps.rl_step import AnySelection, StepResult

Sampler = Ahead | Apart | OneStepAhead


def sampler_of(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    prompts: dict[str, Prompt],
    plan: RunPlan,
    asynchronous: AsyncPlan,
    folder: Path,
    script: Script | None = None,
    responses: KeptResponses | None = None,
) -> Sampler:
    """The sampler of a mode. Args: prompts of the run, by id; folder of the run; script, recorded decisions to be made again;
    responses that are kept."""
    bounds = Bounds.of(
        asynchronous.staleness_steps,
        groups_per_step=plan.step.prompts,
        total_steps=plan.loop.total_steps,
        max_running=asynchronous.max_running_groups,
        on_stale=asynchronous.on_stale,
        domains={} if asynchronous.mode == "one_step" else {each.name: each.prompts for each in plan.step.domains},
    )
    if asynchronous.mode == "one_step":
        return OneStepAhead(
            roles,
            scorer,
            loader,
            prompts,
            bounds,
            plan.step_plan,
            in_thread=asynchronous.in_thread,
            wait_timeout_s=asynchronous.wait_timeout_s,
            folder=folder / "ahead",
            **({"kept": responses.of_step} if responses else {}),
        )
    groups = OpenGroups(
        roles,
        scorer,
        loader,
        prompts,
        bounds,
        lambda draw: plan.step_plan(draw).sampling,
        wait_timeout_s=asynchronous.wait_timeout_s,
        keeps_cache=asynchronous.keeps_cache,
        prepared_groups=asynchronous.prepared_groups,
        domains=plan.step.domains,
        kept=responses,
    )
    if asynchronous.mode == "colocate":
        if script:
            script.check_orders()
        return Ahead(groups, roles.rollout, script)
    assert roles.crew is not None, "the runtime starts the samplers of separate as a crew"
    return Apart(
        groups,
        roles.crew,
        roles.policy,
        loader,
        sync_every_steps=asynchronous.sync_every_steps,
        sync_between_tokens=asynchronous.sync_between_tokens,
        wait_timeout_s=asynchronous.wait_timeout_s,
        script=script,
    )


def run(parts: RlRun, sampler: Sampler, script: Script | None = None) -> None:
    """The steps of a run, each on the groups that its sampler gives; decisions are written to schedule.jsonl step by step.

    Raises: RunStopped when a step trains on other groups than in the run whose script is followed.
    """
    schedule = Schedule(parts.run.folder, parts.run.first_step, sampler.ledger.admitted)
    sampler.ledger.record = schedule.add
    if parts.responses and not isinstance(sampler, OneStepAhead):
        parts.responses.announce_groups()
    under_way = 0  # number of the step
    clock_of_step: Clock | None = None

    def sample(number: int, step_plan: StepPlan, clock: Clock) -> AnySelection:
        nonlocal under_way, clock_of_step
        under_way, clock_of_step = number, clock
        selection = sampler.sample(number, step_plan, clock)
        if script:
            check_replayed(number, sampler, script)
        return selection

    def end_step(done: StepResult, version: int) -> dict[str, float]:
        metrics = asynchrony_metrics(
            done.selection.groups,
            done.learned.train,
            done.learned.stats,
            consumed=sampler.consumed,
            steps=under_way - 1,
            version=version,
            over_rows=parts.roles.over_rows,
        )
        ended = sampler.end_step()
        schedule.flush()
        if ended.drops.groups:
            metrics["async/dropped_length_mean"] = ended.drops.tokens / len(ended.drops.groups)
        return {
            **metrics,
            **ended.more,
            **(waits(clock_of_step, ended) if clock_of_step else {}),
            **at_bound(sampler, under_way - 1),
            "async/late_share": len(sampler.late) / sampler.ledger.bounds.groups_per_step,
            "async/groups_ahead": float(ended.ahead),
            "async/groups_running": float(ended.running),
            "async/dropped_groups": float(sampler.ledger.dropped),
            "async/dropped_tokens": float(ended.drops.tokens),
            "step/sampled_tokens": float(ended.sampled_tokens),
        }

    source = GroupSource(
        sample=sample,
        before_sync=sampler.before_sync,
        end_step=end_step,
        sampled_tokens=lambda done: sampler.sampled_tokens,
        validating=sampler.validating,
        epochs=(lambda: sampler.epochs) if isinstance(sampler, Apart | OneStepAhead) else None,
    )
    try:
        run_rl(parts, source)
    finally:
        sampler.close()


def at_bound(sampler: Sampler, trained: int) -> dict[str, float]:
    """The step's groups that were as old as the bound allows, over those that may be: with a bound of 1.5 steps, half of the
    step. Empty where whatever is sampled ahead is as old: one step ahead, and a bound of one step. Args: steps trained before."""
    bounds, consumed = sampler.ledger.bounds, sampler.consumed
    if isinstance(sampler, OneStepAhead) or bounds.staleness <= 1 or not consumed:
        return {}
    most = min(len(consumed), bounds.oldest_per_step or len(consumed))
    return {"async/at_bound_share": sum(trained - each.started >= bounds.staleness for each in consumed) / most}


def waits(clock: Clock, ended: StepEnd) -> dict[str, float]:
    """Time in which a step waited for groups, and in which samplers had nothing to sample or stood still for the trainer.

    The trainer waits while the loop itself samples, waits for a sampler, or for the last groups. A sampler waits outside of all
    sampling, and while only environments are at work; samplers of their own say how busy they were.
    """
    step, own = clock.elapsed_s(), clock.seconds(MAIN)
    trainer = own.get("rollout", 0.0) + own.get("sampler_wait", 0.0)
    busy = ended.more.get("async/sampler_busy_share")
    sampler = step - clock.seconds().get("rollout", 0.0) + ended.idle_s if busy is None else step * (1.0 - busy)
    sampler = min(max(sampler, 0.0), step)
    return {
        "time/trainer_waited_s": trainer,
        "time/samplers_waited_s": sampler,
        "time/trainer_waited_share": trainer / step,
        "time/samplers_waited_share": sampler / step,
    }


def check_replayed(step: int, sampler: Sampler, script: Script) -> None:
    """Raises: RunStopped when a step is about to train on other prompts, responses or rewards than the recorded one."""
    before = script.consumed.get(step, [])
    now = [entry.prompt_id for entry in sampler.consumed]
    if now != (recorded := [group.prompt_id for group in before]):
        raise RunStopped(
            f"{DIFFERS}: its step {step} trains on {', '.join(recorded) or 'nothing'}, and this one's on {', '.join(now)}"
        )
    for entry, group in zip(sampler.consumed, before, strict=True):
        mark = sampler.marks[entry.serial]
        if group.mark and len(group.mark) != len(mark):
            raise RunStopped(
                "the run that is replayed is of an earlier version, whose marks of samples were made otherwise"
            )
        if group.mark and mark != group.mark:
            raise RunStopped(
                f"{DIFFERS} in step {step}: the samples of group {entry.serial} ({entry.prompt_id}) are others. Its prompts and "
                "decisions are the same; tokens, log-probs, versions or rewards are not. A replay needs the same model, "
                "settings, number of workers and kind of machine, and rewards and environments that depend on nothing else"
            )
