"""Do parts of a run again from its records: sampling, scoring, or learning, each without the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.build.plans import reward_plan, run_plan
from posttrain.build.prompts import prompt_loader, read_prompts, training_prompts
from posttrain.build.train import run_scorer
from posttrain.config import RunConfig
from posttrain.config.roles import runtime_of
from posttrain.data.prompts import What
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.interfaces.roles import Roles
from posttrain.loops.rl_plan import RunPlan
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.plan.batch import plan_batches
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, StopReason, Trajectory, TrajectoryGroup
from posttrain.registry import RUNTIMES
from posttrain.report.read import json_rows, read_run
from posttrain.run.batch_files import batch_path, load_scored
from posttrain.run.checkpoint_folders import read_state
from posttrain.run.clock import Clock
from posttrain.run.durable import damage_of
from posttrain.run.run_folder import RunFolder
from posttrain.run.trackers import Trackers
from posttrain.steps.measure import learning_metrics
from posttrain.steps.rl_step import collect, learn
from posttrain.steps.score import score
from posttrain.steps.shape_rewards import RewardState, shape_outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number or outcome, as the run recorded it and as it is now."""

    name: str
    recorded: Any
    now: Any

    @property
    def same(self) -> bool:
        return bool(self.recorded == self.now)


def replay_train(folder: Path, config: RunConfig, step: int | None = None) -> tuple[int, list[Difference]]:
    """Learn once more from the batches that a run has recorded: from its newest checkpoint before ``step`` (or its starting
    weights) on, up to this step. No response is sampled and none is scored, so neither data nor rewards are needed.

    Args: config is the run's, perhaps with changes; step None is the last one recorded.
    Returns: the step, and every metric of its update. Equal settings on the same kind of machine give equal numbers.
    Raises: RequestError when a checkpoint or a batch that is needed is not there.
    """
    recorded = read_run(folder).metrics
    if step is None:
        step = max((_number(path) for path in (folder / "batches").glob("step_*.safetensors")), default=1)
    start = _checkpoint_before(config, step)
    first = _number(start) + 1 if start else 1
    batches = {number: load_scored(batch_path(folder, number)) for number in range(first, step + 1)}
    with _started(_samples_nothing(config, folder), training_prompts=None) as (roles, plan):
        rewards = RewardState(plan.step.reward.kl)
        if start:
            _load(start, roles, rewards)
        roles.weight_sync.publish(roles.policy, roles.rollout)
        for number, batch in batches.items():
            done = learn(roles, batch, rewards, plan.step_plan(number), Clock(Trackers([], []), number))
        now = learning_metrics(done.train, done.stats) | rewards.metrics
    return step, [
        Difference(name=name, recorded=recorded.get(step, {}).get(name), now=now[name]) for name in sorted(now)
    ]


def replay_rollout(folder: Path, config: RunConfig, step: int) -> list[Difference]:
    """Sample the prompts of a step once more, with the weights that the step started with; nothing is scored or learned.

    Returns: the text of every response of the first batch of prompts, by its sample id.
    Raises: RequestError when there is no checkpoint of the step before, or no samples of this one.
    """
    _refuse_environments(config)
    recorded = {str(row.get("sample_id")): row.get("response") for row in _samples(folder, step, validation=False)}
    start = _checkpoint_before(config, step)
    if step > 1 and (start is None or _number(start) != step - 1):
        found = ", ".join(str(_number(path) + 1) for path in _checkpoints(config)) or "1 alone"
        fix = f"steps that begin at a checkpoint are 1 and {found}" if found != "1 alone" else "use --step 1"
        raise RequestError(
            Problem(f"{folder} has no checkpoint of step {step - 1}, which step {step} began with", fix=fix)
        )
    tokenizer = load_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data)
    with ExitStack() as open_ones:
        training, child = training_prompts(config, tokenizer, processor, open_ones)
        prompts = training.prompts[: config.data.max_prompts]
        seed = config.run.seed if config.data.seed is None else config.data.seed
        loader = prompt_loader(config.data, prompts, seed, child)
        roles, plan = open_ones.enter_context(_started(config, training_prompts=len(prompts)))
        if start:
            loader.restore(_load(start, roles, RewardState(plan.step.reward.kl))["loader"])
        roles.weight_sync.publish(roles.policy, roles.rollout)
        groups = collect(roles, loader.next(), plan.step_plan(step).sampling)
    return [
        Difference(name=one.sample_id, recorded=recorded.get(one.sample_id), now=one.text)
        for group in groups
        for one in group.trajectories
    ]


def replay_rewards(folder: Path, config: RunConfig, step: int, *, validation: bool = False) -> list[Difference]:
    """Score the recorded responses of a step, or of its validation, once more. No model is loaded.

    Returns: the outcome of every sample, by its id: its reward, or why it has none.
    Raises: RequestError when there are no such samples, or their prompts are no longer in the data files.
    """
    _refuse_environments(config)
    if config.reward.judges:
        what = "a judge is not asked again: only the terms of the reward are"
        raise RequestError(
            Problem(
                what, fix="use reward.judge=null reward.more_judges={} to score the terms alone", field="reward.judge"
            )
        )
    if config.reward.served is not None:
        what = "the model that reward functions ask is not served again"
        fix = "serve it apart, and give the functions its address: reward.served=null and reward.terms.0.options"
        raise RequestError(Problem(what, fix=fix, field="reward.served"))
    if config.reward.model is not None:
        what = "a reward model is not asked again: only the terms of the reward are"
        raise RequestError(Problem(what, fix="use reward.model=null to score the terms alone", field="reward.model"))
    rows = list(_samples(folder, step, validation=validation))
    import_modules(config.model.external_modules)
    tokenizer = load_tokenizer(config.model)
    which: What = "validation" if validation else "training"
    field = "validation_files" if validation else "train_files"
    processor = load_processor(config.model, tokenizer, config.data)
    known = read_prompts(config, tokenizer, processor, what=which).prompts
    prompts = {one.prompt_id: one for one in known}
    gone = sorted({str(row.get("prompt_id")) for row in rows} - prompts.keys())
    if gone:
        what = f"{len(gone)} prompts of these samples are not in the data files, such as {gone[0]}"
        raise RequestError(Problem(what, fix="name the files that the run had", field=f"data.{field}"))
    groups = _groups(rows, prompts)
    with closing(run_scorer(config)) as scorer:
        scored = score(groups, scorer)
        if not validation:
            scored = shape_outcomes(scored, reward_plan(config))
    now = {
        one.sample_id: _outcome(outcome)
        for group in scored
        for one, outcome in zip(group.group.trajectories, group.outcomes, strict=True)
    }
    return [
        Difference(name=name, recorded=_recorded(row), now=now[name])
        for row in rows
        for name in [str(row["sample_id"])]
    ]


def _groups(rows: Sequence[Mapping[str, Any]], prompts: Mapping[str, Prompt]) -> list[TrajectoryGroup]:
    """The recorded responses by prompt. Of their tokens only the number is known, which is all that scoring looks at."""
    by_prompt: dict[str, list[Trajectory]] = defaultdict(list)
    for row in rows:
        by_prompt[str(row["prompt_id"])].append(
            Trajectory(
                sample_id=str(row["sample_id"]),
                token_ids=(0,) * int(row["response_tokens"]),
                logprobs=(),
                text=str(row["response"]),
                stop_reason=StopReason(row["stop_reason"]),
                policy_version=int(row["policy_version"]),
            )
        )
    return [TrajectoryGroup(prompt=prompts[name], trajectories=tuple(all_of)) for name, all_of in by_prompt.items()]


def _outcome(outcome: Outcome) -> Any:
    return f"invalid: {outcome.reason}" if isinstance(outcome, Invalid) else outcome.value


def _recorded(row: Mapping[str, Any]) -> Any:
    invalid = row.get("invalid")
    return f"invalid: {invalid['reason']}" if invalid else row.get("reward")


def _samples(folder: Path, step: int, *, validation: bool) -> Iterator[dict[str, Any]]:
    """Raises: RequestError when the run wrote none, or a line of them is damaged."""
    run = read_run(folder)
    files = run.validation if validation else run.samples
    if step not in files:
        kind = "validation" if validation else "training"
        known = f"there are those of steps {', '.join(map(str, list(files)[:20]))}" if files else "there are none"
        raise RequestError(Problem(f"{folder} has no samples of a {kind} at step {step}", fix=known))
    notes: list[str] = []
    yield from json_rows(files[step], notes)
    if notes:
        raise RequestError([Problem(note) for note in notes])


def _refuse_environments(config: RunConfig) -> None:
    if config.environment.used:
        what = "episodes in an environment are not sampled or scored again: their rewards come from the environment"
        fix = "posttrain replay train learns from them"
        raise RequestError(Problem(what, fix=fix, field="environment"))


def _samples_nothing(config: RunConfig, folder: Path) -> RunConfig:
    """The run's config with the cheapest sampler and the planned number of steps: data files are not read."""
    total = config.run.total_steps or int(read_run(folder).info.get("total_steps") or 1)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"engine": "native", "weight_sync": "auto", "endpoints": []}),
            "reward": config.reward.model_copy(
                update={"model": None, "judge": None, "more_judges": {}, "served": None}
            ),
            "run": config.run.model_copy(update={"total_steps": total}),
        }
    )


@contextmanager
def _started(config: RunConfig, training_prompts: int | None) -> Iterator[tuple[Roles, RunPlan]]:
    """The roles of a run and its plan, for as long as it is entered. Raises: ConfigError when its sizes do not fit."""
    import_modules(config.model.external_modules)
    tokenizer = load_tokenizer(config.model)
    batches, problems = plan_batches(config, training_prompts)
    if batches is None:
        raise ConfigError(problems)
    plan = run_plan(config, batches, [], tokenizer.pad_token_id)
    with closing(RUNTIMES.get(runtime_of(config.placement))().start(config, batches, tokenizer)) as roles:
        yield roles, plan


def _load(checkpoint: Path, roles: Roles, rewards: RewardState) -> dict[str, Any]:
    """Put the models where they were at a checkpoint; what else it knows is returned."""
    state = read_state(checkpoint)
    roles.policy.load(checkpoint / "policy")
    if roles.critic:
        roles.critic.load(checkpoint / "critic")
    if roles.process_reward:
        roles.process_reward.engine.load(checkpoint / "process_reward")
    if state.get("rewards"):
        rewards.restore(state["rewards"])
    return state


def _checkpoint_before(config: RunConfig, step: int) -> Path | None:
    return max((path for path in _checkpoints(config) if _number(path) < step), key=_number, default=None)


def _checkpoints(config: RunConfig) -> list[Path]:
    """The run's checkpoints that are whole, by step."""
    folder = RunFolder(config).checkpoints
    return sorted((path for path in folder.glob("global_step_*") if damage_of(path) is None), key=_number)


def _number(path: Path) -> int:
    """global_step_12, step_12.safetensors: 12."""
    return int(path.stem.rpartition("_")[2])
