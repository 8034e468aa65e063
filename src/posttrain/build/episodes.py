"""Play the episodes of a run's configuration with a model that is not trained: for evaluation, and for a file of episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from posttrain.backends.environments.start import own_code, start_worlds
from posttrain.backends.runtime.inprocess import start_sampler
from posttrain.backends.serving.start import start_judges
from posttrain.backends.torch_training.start import start_reward_model
from posttrain.build.fits import check_prompts_fit
from posttrain.build.judge_server import serve_judge
from posttrain.build.plans import reward_plan, sampling_params
from posttrain.build.prompts import read_prompts
from posttrain.build.train import run_scorer
from posttrain.config import RunConfig
from posttrain.config.environment import OPEN
from posttrain.config.shown import shown
from posttrain.data.episodes import training_episodes, validation_episodes
from posttrain.data.prompts import PromptSet
from posttrain.errors import ConfigError, Problem, RunInterrupted
from posttrain.loops import episodes
from posttrain.loops.by_parts import OnWork
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, SamplingParams, ScoredGroup, TrajectoryGroup
from posttrain.run.episode_texts import read_episode
from posttrain.run.lock import InUse, only_trainer
from posttrain.run.parts import Parts, folder_hashes, hashes, parts_folder
from posttrain.run.samples import as_json
from posttrain.run.stopping import GraceOver, StopSignal

COLUMN = "episodes"
# Sections of the configuration that the episodes depend on.
SECTIONS = ("model", "data", "environment", "rollout", "validation", "reward")

OnPlan = Callable[[int, int, list[str]], None]  # rows, rows that are done already, and messages for a person


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesRequest:
    """Episodes to play: of the validation rows with the sampling of the validation, or of the training rows with the
    training's."""

    config: RunConfig
    out: Path  # a parquet file
    training: bool = False
    rows_per_part: int = 32
    overwrite: bool = False


def play_episodes(request: EpisodesRequest, *, on_plan: OnPlan, on_work: OnWork) -> bool:
    """Play every episode that is not there yet, and write them into ``request.out``: a row per prompt with the columns
    ``prompt_id``, ``data_source``, ``ground_truth`` and ``extra_info`` (JSON), ``responses`` (texts), ``rewards`` (null
    without one) and ``episodes`` (JSON, run.episode_texts). Returns: True when there was anything to play.

    Raises: RequestError for what can be seen before the first episode; RunInterrupted when a signal asked to stop; RunStopped
        when the sampler fails.
    """
    try:
        return _play(request, on_plan, on_work)
    finally:
        with suppress(OSError):  # parts are kept in it
            parts_folder(request.out).rmdir()


def _play(request: EpisodesRequest, on_plan: OnPlan, on_work: OnWork) -> bool:
    config, out = request.config, request.out
    with ExitStack() as stack:
        try:
            notes = stack.enter_context(only_trainer(parts_folder(out)))
        except InUse:
            raise ConfigError(
                Problem(f"another process is writing {out}", fix="wait for it, or name another --out")
            ) from None
        import_modules(config.model.external_modules)
        tokenizer = load_tokenizer(config.model)
        found = rows_of(config, tokenizer, training=request.training)
        prompts = found.prompts
        parts = Parts(
            out,
            request_of(request),
            column=COLUMN,
            rows=len(prompts),
            rows_per_part=request.rows_per_part,
            option="--out",
        )
        if request.overwrite:
            parts.discard()
        if parts.finished:
            parts.tidy()
            on_plan(len(prompts), len(prompts), [f"{out} is complete already; --overwrite plays it again"])
            return False
        parts.check()
        positions = check_prompts_fit(config, prompts, [])
        worlds = None
        if config.environment.used:
            here = config.environment.name == OPEN  # those that score in a run play
            worlds = start_worlds(config, tokenizer, positions, prompts, played_here=here)
            stack.callback(worlds.host.close)
        scorer = stack.enter_context(closing(run_scorer(config)))
        engine, device = start_sampler(config, tokenizer)
        serve_judge(config, scorer, device, stack)
        rewards = reward_plan(config)
        players = episodes.Players(
            engine=engine,
            worlds=worlds,
            scorer=scorer,
            reward_model=start_reward_model(config, tokenizer, device),
            model_weight=rewards.model_weight,
            judges=start_judges(config, device),
            judging=rewards.judges,
        )
        parts.begin()
        missing = sum(len(parts.rows_of(part)) for part in parts.missing())
        overlong = found.overlong_message("training" if request.training else "validation")
        on_plan(len(prompts), len(prompts) - missing, [*notes, f"sampling on {device}", *overlong])
        try:
            with StopSignal() as stop:
                sampling = sampling_of(config, training=request.training)
                episodes.run(players, prompts, sampling, parts, stop=stop, on_work=on_work)
        except GraceOver:
            raise RunInterrupted(
                f"stopped in the middle of a part, which is played again; finished rows are kept in {parts.folder}"
            ) from None
        parts.finish(_table(prompts, parts.responses()))
    return True


def rows_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, training: bool) -> PromptSet:
    """The prompts to play. Raises: RequestError when there are none."""
    environment, data = config.environment, config.data
    if environment.name == OPEN and not environment.named:
        what = (
            "the environment is open: its episodes are played by programs outside, which only posttrain train waits for"
        )
        fix = "name an environment that runs here (environment.name=...), or serve the checkpoint to them (posttrain serve)"
        raise ConfigError(Problem(what, fix=fix, field="environment.name"))
    which = "training" if training else "validation"
    files, generated = (
        (data.train_files, environment.train_episodes)
        if training
        else (data.validation_files, environment.validation_episodes)
    )
    if files:
        processor = load_processor(config.model, tokenizer, data)
        found = read_prompts(config, tokenizer, processor, what="training" if training else "validation")
    elif generated:
        found = PromptSet.generated((training_episodes if training else validation_episodes)(environment))
    else:
        name = "train" if training else "validation"
        fix = f"name data.{name}_files or environment.{name}_episodes" + ("" if training else ", or add --training")
        raise ConfigError(Problem(f"there are no {which} rows to play", fix=fix, field=f"data.{name}_files"))
    limit = data.max_prompts if training else config.validation.max_prompts
    return PromptSet(prompts=found.prompts[:limit], rows=found.rows, dropped=found.dropped, truncated=found.truncated)


def sampling_of(config: RunConfig, *, training: bool) -> SamplingParams:
    chosen = config.rollout if training else config.validation
    tokens = config.rollout.max_response_tokens
    if not training:
        tokens = config.validation.max_response_tokens or tokens
    return sampling_params(chosen, tokens, config.run.seed)


def request_of(request: EpisodesRequest) -> dict[str, Any]:
    """Everything that the episodes depend on: settings, and the content of data files, the model's folder and files of the
    user's own."""
    config = request.config
    whole = shown(config)
    data = config.data.train_files if request.training else config.data.validation_files
    own = [
        Path(name.rpartition(":")[0])
        for name in own_code(config.environment)
        if name.rpartition(":")[0].endswith(".py")
    ]
    own += [Path(term.path) for term in config.reward.terms if term.path and term.path.endswith(".py")]
    folder = Path(config.model.path).expanduser()
    return {
        "config": {name: whole[name] for name in SECTIONS} | {"run.seed": config.run.seed},
        "training": request.training,
        "rows_per_part": request.rows_per_part,
        "data.files": hashes([Path(file).expanduser() for file in data]),
        "own.files": hashes([path for path in dict.fromkeys(own) if path.is_file()]),
        "model.path": folder_hashes(folder) if folder.is_dir() else {},
    }


def _table(prompts: Sequence[Prompt], played: pa.ChunkedArray) -> pa.Table:
    """The columns besides the episodes."""
    groups = [[read_episode(text) for text in texts] for texts in played.to_pylist()]
    plain = partial(json.dumps, ensure_ascii=True, default=str)
    return pa.table({
        "prompt_id": pa.array([prompt.prompt_id for prompt in prompts], pa.string()),
        "prompt": pa.array([prompt.text for prompt in prompts], pa.string()),
        "data_source": pa.array([prompt.data_source for prompt in prompts], pa.string()),
        "ground_truth": pa.array([plain(as_json(prompt.ground_truth)) for prompt in prompts], pa.string()),
        "extra_info": pa.array([plain(as_json(dict(prompt.extra_info))) for prompt in prompts], pa.string()),
        "responses": pa.array([[_utf8(one.text) for one, _ in group] for group in groups], pa.list_(pa.string())),
        "rewards": pa.array(
            [[outcome.value if isinstance(outcome, Reward) else None for _, outcome in group] for group in groups],
            pa.list_(pa.float64()),
        ),
    })  # fmt: skip


def _utf8(text: str) -> str:
    """The text with U+FFFD for halves of characters, which a parquet file cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_episodes(out: Path) -> list[ScoredGroup]:
    """Read the groups of a file that ``play_episodes`` wrote. Prompts have texts and no tokens."""
    found = []
    for row in pq.read_table(out).to_pylist():
        played = [read_episode(text) for text in row[COLUMN]]
        prompt = Prompt(
            prompt_id=row["prompt_id"],
            token_ids=(),
            text=row["prompt"],
            data_source=row["data_source"],
            ground_truth=json.loads(row["ground_truth"]),
            extra_info=json.loads(row["extra_info"]),
        )
        group = TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectory for trajectory, _ in played))
        found.append(ScoredGroup(group=group, outcomes=tuple(outcome for _, outcome in played)))
    return found
