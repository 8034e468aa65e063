"""The one place where names in a RunConfig become objects."""

from __future__ import annotations

import inspect
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from posttrain import __version__
from posttrain.backends.tracking.jsonl import Jsonl
from posttrain.config import RunConfig
from posttrain.config.rollout import SamplingConfig
from posttrain.data.loader import ShuffledLoader
from posttrain.data.prompts import load_prompts
from posttrain.dialects.native.write import to_yaml
from posttrain.errors import ConfigError, Problem, RequestError, RunInterrupted, RunStopped
from posttrain.loops import rl_sync
from posttrain.loops.stopping import StopSignal
from posttrain.loops.trackers import Trackers
from posttrain.models.loading import load_tokenizer
from posttrain.placement.batch import plan_batches
from posttrain.records.plans import AdvantagePlan, BatchPlan, LossPlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, RUNTIMES, TRACKERS
from posttrain.rewards.load import load_rewards
from posttrain.stages.checkpoint import Checkpoints


def train_run(config: RunConfig) -> Path:
    """Run it, from the data to the last checkpoint. Returns the run folder.

    Raises: RequestError for what can be seen before the first step; RunStopped and RunInterrupted as the loop says.
    """
    folder = Path(config.folder)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep_last)
    refuse_used_folder(config, folder)
    scorer = load_rewards(config.reward)
    tokenizer = load_tokenizer(config.model)
    training = load_prompts(config.data.train_files, config.data, tokenizer, what="training")
    validation: Sequence[Prompt] = []
    if config.data.validation_files:
        validation = load_prompts(config.data.validation_files, config.data, tokenizer, what="validation").prompts
        validation = validation[: config.validation.max_prompts]
    batches, problems = plan_batches(config, len(training.prompts))
    if batches is None:
        raise ConfigError(problems)
    loader = ShuffledLoader(
        training.prompts, config.data.prompts_per_step, seed=config.run.seed, shuffle=config.data.shuffle
    )
    plan = run_plan(config, batches, validation)
    trackers = Trackers([Jsonl(folder)], [TRACKERS.get(name)() for name in config.tracking.trackers])

    roles = RUNTIMES.get("inprocess")().start(config, batches, tokenizer)
    first_step = checkpoints.restore(roles.policy, loader, trackers.message) + 1
    changes = changed_keys(folder / "config.yaml", config) if first_step > 1 else []
    folder.mkdir(parents=True, exist_ok=True)  # from here on: a request that is refused leaves the folder as it was
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    about = RunRecord(folder, config, roles.device, plan.total_steps)
    about.write("running")
    trackers.begin(config, plan.total_steps, first_step)
    if first_step > 1:
        trackers.message(f"going on after step {first_step - 1}")
    for change in changes:
        trackers.message(f"changed since this run was started: {change}")
    if training.dropped:
        trackers.message(f"{training.dropped} of {training.rows} training prompts are too long and were left out")
    try:
        with StopSignal() as stop:
            rl_sync.run(
                roles,
                scorer,
                loader,
                plan,
                first_step=first_step,
                folder=folder,
                checkpoints=checkpoints,
                trackers=trackers,
                stop=stop,
            )
        about.write("done")
    except RunInterrupted:
        about.write("interrupted")
        raise
    except RunStopped as error:
        about.write("stopped")
        last_good = checkpoints.newest_name() or "none was saved"
        raise RunStopped(f"{error}\nLast good checkpoint: {last_good}") from error
    except BaseException:
        about.write("failed")
        raise
    finally:
        trackers.close()
    return folder


def run_plan(config: RunConfig, batches: BatchPlan, validation: Sequence[Prompt]) -> rl_sync.RunPlan:
    """What the loop is told, from the configuration."""
    assert batches.total_steps is not None and batches.steps_per_epoch is not None
    loss = LossPlan(
        name=config.loss.name,
        parameters=chosen_parameters(POLICY_LOSSES.get(config.loss.name), config.loss),
        aggregation=config.loss.aggregation,
        temperature=config.rollout.temperature,
        entropy_coef=config.loss.entropy_coef,
        kl_coef=config.loss.kl_coef,
        kl_estimator=config.loss.kl_estimator,
    )
    step = rl_sync.StepPlan(
        sampling=sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed),
        advantage=AdvantagePlan(
            name=config.advantage.name,
            parameters=chosen_parameters(ADVANTAGES.get(config.advantage.name), config.advantage),
        ),
        update=UpdatePlan(
            loss=loss,
            epochs=batches.epochs_per_step,
            sequences_per_update=batches.sequences_per_update,
            on_policy=batches.on_policy,
        ),
        max_invalid_share=config.reward.max_invalid_share,
    )
    validation_tokens = config.validation.max_response_tokens or config.rollout.max_response_tokens
    return rl_sync.RunPlan(
        step=step,
        seed=config.run.seed,
        validation_sampling=sampling_params(config.validation, validation_tokens, config.run.seed),
        validation_prompts=validation,
        total_steps=batches.total_steps,
        steps_per_epoch=batches.steps_per_epoch,
        max_skipped_steps=config.run.max_skipped_steps,
        validate_every=config.validation.every_steps,
        validate_before=config.validation.before_training,
        validate_after=config.validation.after_training,
        save_every=config.checkpoint.every_steps,
        save_at_end=config.checkpoint.at_end,
        samples_every=config.tracking.samples_every_steps,
    )


def chosen_parameters(function: Callable[..., Any], section: Any) -> dict[str, Any]:
    """The fields of a config section that a registered function asks for by keyword."""
    keywords = inspect.signature(function).parameters.values()
    return {
        keyword.name: getattr(section, keyword.name)
        for keyword in keywords
        if keyword.kind is keyword.KEYWORD_ONLY and hasattr(section, keyword.name)
    }


def sampling_params(config: SamplingConfig, max_response_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        samples_per_prompt=config.samples_per_prompt,
        max_response_tokens=max_response_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        stop=tuple(config.stop),
        stop_token_ids=tuple(config.stop_token_ids),
        ignore_eos=config.ignore_eos,
        seed=seed,
    )


def changed_keys(saved: Path, config: RunConfig) -> list[str]:
    """What a run that goes on does differently from the configuration it was started with, a line per key."""
    if not saved.exists():
        return []
    before = _flat(yaml.safe_load(saved.read_text(encoding="utf-8")))
    now = _flat(yaml.safe_load(to_yaml(config)))
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in now | before if before.get(key) != now.get(key)]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def refuse_used_folder(config: RunConfig, folder: Path) -> None:
    """A folder with a run in it is only written to when its checkpoints are meant to be continued."""
    if config.run.resume == "never" and (folder / "metrics.jsonl").exists():
        raise RequestError(
            Problem(
                f"{folder} already holds a run",
                fix="name another run.folder, or set run.resume=auto",
                field="run.folder",
            )
        )


class RunRecord:
    """RUN_DIR/run.json: what ran, on what, and how it ended."""

    def __init__(self, folder: Path, config: RunConfig, device: str, total_steps: int):
        self._path = folder / "run.json"
        import torch
        import transformers

        self._content = {
            "name": config.run.name,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device,
            "total_steps": total_steps,
            "versions": {
                "posttrain": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def write(self, status: str) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._content | {"status": status}, indent=1))
        os.replace(beside, self._path)
