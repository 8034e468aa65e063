"""Run reinforcement learning from a RunConfig."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.asynchrony.script import Script
from posttrain.backends.environments.start import plays_groups, start_worlds, validating
from posttrain.build.fits import check_critic_fits, check_prompts_fit
from posttrain.build.plans import run_plan
from posttrain.build.prompts import prompt_loader, read_prompts, training_prompts
from posttrain.build.recorded_decisions import decisions_of
from posttrain.build.runs import as_written, open_run, run_trackers, say_nothing
from posttrain.config import RunConfig
from posttrain.config.environment import OPEN
from posttrain.config.roles import measures_nothing, runtime_of
from posttrain.data.episodes import validation_episodes
from posttrain.data.prompts import unread_image_settings
from posttrain.data.token_texts import token_texts_of
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.loops import rl_async, rl_sync
from posttrain.loops.rl_run import RlRun
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.plan.batch import plan_batches
from posttrain.plan.checks.images import image_problems
from posttrain.plan.files import check_sees_alike
from posttrain.records.prompts import Prompt
from posttrain.registry import RUNTIMES
from posttrain.rewards.asking import AskingScorer
from posttrain.rewards.no_terms import NothingToScore
from posttrain.rewards.scorer import Scorer
from posttrain.rewards.served import queries_a_server, start_scorer
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.kept_responses import KeptResponses, check_folder
from posttrain.run.lifetime import begin_run, under_way
from posttrain.run.progress import Progress
from posttrain.run.run_folder import RunFolder
from posttrain.steps.apart import Apart
from posttrain.steps.reference_answers import reference_warning
from posttrain.steps.shape_rewards import RewardState


def train_run(
    config: RunConfig,
    *,
    allow_config_change: bool = False,
    start_over: bool = False,
    say: Callable[[str], None] = say_nothing,
    in_words: Callable[[str], str] = as_written,
    replay: Path | None = None,
) -> Path:
    """Run it, from the data to the last checkpoint. Returns the run folder.

    Args: allow_config_change resumes a run although a setting has changed that its numbers depend on; start_over begins at the
        first step where all checkpoints of a run are damaged or gone; say receives what is being loaded, before the trackers
        of the run are open; in_words replaces the names of fields in
        the run's messages by the user's; replay is the folder of an asynchronous run whose recorded decisions are made again.
    Raises: RequestError for what can be seen before the first step; RunStopped and RunInterrupted as the loop says.
    """
    script = decisions_of(replay, config) if replay else None
    opened = open_run(config, allow_config_change=allow_config_change, start_over=start_over)
    with opened as (folder, checkpoints, notes), closing(run_scorer(config)) as scorer:
        with under_way_with(config, folder, checkpoints, notes, scorer, say, script, in_words) as made:
            if made.ahead:
                rl_async.run(made.parts, made.ahead, script)
            else:
                rl_sync.run(made.parts)
        return folder.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run whose models are loaded and whose first step may begin."""

    parts: RlRun
    ahead: rl_async.Sampler | None  # samples ahead of training; None in a synchronous run
    tokenizer: PreTrainedTokenizerBase


@contextmanager
def under_way_with(
    config: RunConfig,
    folder: RunFolder,
    checkpoints: Checkpoints,
    notes: list[str],
    scorer: GroupScorer,
    say: Callable[[str], None] = say_nothing,
    script: Script | None = None,
    in_words: Callable[[str], str] = as_written,
) -> Iterator[Training]:
    """Load the data and the models, restore the newest checkpoint, and begin the run; its steps are made inside.

    Raises: as ``train_run``.
    """
    with ExitStack() as started:
        import_modules(config.model.external_modules)
        say("loading tokenizer and data")
        tokenizer = load_tokenizer(config.model)
        processor = load_processor(config.model, tokenizer, config.data)
        training, sampler_process = training_prompts(config, tokenizer, processor, started)
        overlong = training.overlong_message("training")
        validation: Sequence[Prompt] = validation_episodes(config.environment)[: config.validation.max_prompts]
        if config.data.validation_files:
            held_out = read_prompts(config, tokenizer, processor, what="validation")
            validation = held_out.prompts[: config.validation.max_prompts]
            overlong += held_out.overlong_message("validation")
        prompts = training.prompts[: config.data.max_prompts]
        order_seed = config.run.seed if config.data.seed is None else config.data.seed
        loader: PromptLoader | None = None
        rows = len(prompts)
        if sampler_process is not None:
            loader = prompt_loader(config.data, prompts, order_seed, sampler_process, tokenizer.pad_token_id or 0)
            rows = loader.steps_per_epoch * config.data.prompts_per_step
        batches, problems = plan_batches(config, rows)
        if batches is None:
            raise ConfigError(problems)
        loader = loader or prompt_loader(config.data, prompts, order_seed)
        if any(prompt.images for prompt in (*prompts, *validation)):
            problems = [*image_problems(config), *check_sees_alike(config)]
            if problems:
                raise ConfigError(problems)
        unread = unread_image_settings(config.data, [*prompts, *validation])
        positions = check_prompts_fit(config, prompts, validation)
        if batches.critic:
            check_critic_fits(config, tokenizer, prompts)
        plan = run_plan(config, batches, validation, tokenizer.pad_token_id)
        trackers = run_trackers(config.tracking, folder.path, in_words)

        say(f"loading model {config.model.path}")
        roles = started.enter_context(
            closing(RUNTIMES.get(runtime_of(config.placement))().start(config, batches, tokenizer))
        )
        if isinstance(scorer, AskingScorer):
            scorer.lead_to(roles.reward_servers)
        if config.environment.used:
            worlds = start_worlds(config, tokenizer, positions, [*prompts, *validation], processor, folder.path)
            started.callback(worlds.host.close)
            roles = replace(roles, worlds=worlds)
            notes = [*notes, *worlds.notes]
        if validation and config.environment.name == OPEN:
            worlds = start_worlds(config, tokenizer, positions, validation, processor, played_here=True)
            started.callback(worlds.host.close)
            roles = replace(roles, validation_worlds=worlds)
        elif validation and plays_groups(config.environment):
            worlds = start_worlds(validating(config), tokenizer, positions, validation, processor)
            started.callback(worlds.host.close)
            roles = replace(roles, validation_worlds=worlds)
        players = roles
        beside = config.asynchronous.mode in ("colocate", "separate") and config.environment.name != OPEN
        if config.environment.used and beside:
            # Their episodes go on while those of a validation are played.
            worlds = start_worlds(config, tokenizer, positions, prompts, processor)
            started.callback(worlds.host.close)
            players = replace(roles, worlds=worlds)
        rewards = RewardState(plan.step.reward.kl)
        sampler, responses = None, kept_responses(config, trackers.message)
        if script and responses:
            what = "a replay samples its responses again, and rollout.replay_folder reads them"
            raise ConfigError(Problem(what, fix="use rollout.replay_folder=null", field="rollout.replay_folder"))
        if plan.asynchronous:
            by_id = {prompt.prompt_id: prompt for prompt in prompts}
            sampler = rl_async.sampler_of(
                players, scorer, loader, by_id, plan, plan.asynchronous, folder.path, script, responses
            )
            if isinstance(sampler, Apart):
                roles = replace(roles, weight_sync=sampler)
        progress = Progress(
            policy=roles.policy,
            critic=roles.critic,
            process_reward=roles.process_reward.engine if roles.process_reward else None,
            loader=loader,
            rewards=rewards,
            ahead=sampler,
        )
        first_step = checkpoints.restore(progress, trackers.message) + 1
        scorer.keep_in(folder.path)
        begin_run(
            config,
            folder,
            checkpoints,
            trackers,
            first_step=first_step,
            total_steps=plan.loop.total_steps,
            device=roles.device,
            notes=[*notes, *overlong, *unread, *roles.notes],
            saved_bytes=checkpoints.bytes_of(progress.engines.values()),
            save_steps=plan.loop.save_steps(first_step),
        )
        if first_step == 1 and checks_references(config):
            encode = partial(tokenizer.encode, add_special_tokens=False)
            if warning := reference_warning(scorer, prompts, encode):
                trackers.message(f"warning: {warning}")
        with under_way(config, folder, checkpoints, trackers, first_step) as run:
            parts = RlRun(
                roles=roles,
                scorer=scorer,
                loader=loader,
                rewards=rewards,
                progress=progress,
                plan=plan,
                run=run,
                token_texts=token_texts_of(tokenizer),
                responses=responses,
            )
            yield Training(parts=parts, ahead=sampler, tokenizer=tokenizer)


def kept_responses(config: RunConfig, say: Callable[[str], None]) -> KeptResponses | None:
    """The folder of responses that steps are read from; None without. Raises: RequestError where the path is a file."""
    if config.rollout.replay_folder is None:
        return None
    folder = Path(config.rollout.replay_folder).expanduser()
    check_folder(folder)
    return KeptResponses(folder=folder, model=config.model.path, say=say, steps=config.rollout.replay_steps)


def checks_references(config: RunConfig) -> bool:
    """Return True when the reward is only made of functions, which are quick and cost nothing to call."""
    functions = not any(queries_a_server(term) for term in config.reward.terms)
    alone = config.reward.model is None and not config.reward.judges and config.reward.served is None
    return config.reward.check_references and bool(config.reward.terms) and alone and functions


def run_scorer(config: RunConfig) -> Scorer:
    """Start the scorer of a run. Raises: ConfigError with the problems of all terms."""
    if measures_nothing(config):
        return NothingToScore("teachers alone are learned from, and there is no reward term")
    if config.environment.used and not config.reward.terms and config.reward.model is None:
        return NothingToScore()
    tokenizer = cache(lambda: load_tokenizer(config.model))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer().decode(list(ids), skip_special_tokens=False))

    made = ("posttrain.build.own_rows:tokenizer_of", config.model.model_dump(mode="json"))
    if config.reward.served is not None:
        return AskingScorer(partial(start_scorer, decode=decode, tokenizer=made), config.reward)
    return start_scorer(config.reward, decode, made)
