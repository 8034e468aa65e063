"""Play one episode of a run's environment by hand, from a RunConfig. The model is loaded only where it takes the turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from posttrain.backends.environments.start import start_worlds
from posttrain.backends.runtime.inprocess import start_sampler
from posttrain.backends.torch_training.start import pick_device
from posttrain.build.fits import check_prompts_fit
from posttrain.build.judge_server import serve_judge
from posttrain.build.plans import sampling_params
from posttrain.build.prompts import read_prompts
from posttrain.build.train import run_scorer
from posttrain.config import RunConfig
from posttrain.config.environment import SINGLE_TURN
from posttrain.data.episodes import training_episodes, validation_episodes
from posttrain.data.prompts import What
from posttrain.data.templates import ids_of
from posttrain.data.tool_forms.written import decoded
from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.interfaces.rollout_engine import TurnSampler
from posttrain.loops.by_hand import ReadTurn, TypedTurns, Watch, play_by_hand
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import ScoredGroup
from posttrain.steps.score import score


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeChoice:
    """The episode to play."""

    row: int = 0  # of the data, or of the generated episodes
    validation: bool = False
    environment: str | None = None  # a name in environment.named, for rows of any
    seed: int | None = None  # of the environment; None: the row's


class Decoder:
    """The texts of tokens, for people."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer

    def whole(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def each(self, token_ids: Sequence[int]) -> list[str]:
        return [self.whole([token]) for token in token_ids]

    def plain(self, token_ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, token_ids)


WatchMaker = Callable[[RunConfig, Prompt, Decoder], Watch]


def play_run(config: RunConfig, choice: EpisodeChoice, read: ReadTurn | None, watch_with: WatchMaker) -> ScoredGroup:
    """Play an episode and score it.

    Args: read, the turns that a person or a script writes; None: the model takes them. watch_with makes the watch, from the
        chosen prompt and the decoder of tokens.
    Raises: RequestError.
    """
    config = _with_environment(config)
    import_modules(config.model.external_modules)
    tokenizer = load_tokenizer(config.model)
    prompt = _prompt(config, choice, tokenizer)
    positions = check_prompts_fit(config, [prompt], [])
    with ExitStack() as stack:
        processor = load_processor(config.model, tokenizer, config.data)
        worlds = start_worlds(config, tokenizer, positions, [prompt], processor)
        stack.callback(worlds.host.close)
        scorer = stack.enter_context(closing(run_scorer(config)))
        serve_judge(config, scorer, pick_device(config.placement.device), stack)
        sampling = sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed)
        player: TurnSampler
        if read is None:
            player, _ = start_sampler(config, tokenizer)
        else:
            end = tokenizer.eos_token_id
            player = TypedTurns(read, partial(ids_of, tokenizer), end if isinstance(end, int) else None)
        group = play_by_hand(prompt, worlds, player, sampling, watch_with(config, prompt, Decoder(tokenizer)))
        [scored] = score([group], scorer)
    return scored


def _with_environment(config: RunConfig) -> RunConfig:
    """One environment at a time; a run without one is a conversation of a single turn."""
    environment = config.environment
    changes = {"workers": min(environment.workers, 1)} | ({} if environment.used else {"name": SINGLE_TURN})
    return config.model_copy(update={"environment": environment.model_copy(update=changes)})


def _prompt(config: RunConfig, choice: EpisodeChoice, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The chosen row. Raises: RequestError when there is no such row or environment."""
    environment = config.environment
    what = "validation" if choice.validation else "training"
    generated = environment.validation_episodes if choice.validation else environment.train_episodes
    if generated is not None:
        prompts = (validation_episodes if choice.validation else training_episodes)(environment)
    else:
        files = config.data.validation_files if choice.validation else config.data.train_files
        field = f"data.{'validation' if choice.validation else 'train'}_files"
        if not files:
            raise ConfigError(Problem(f"there is no {what} file to take a row from", field=field))
        which: What = "validation" if choice.validation else "training"
        prompts = list(read_prompts(config, tokenizer, None, what=which, limit=choice.row + 1).prompts)
    if choice.row >= len(prompts):
        raise ConfigError(
            Problem(f"there is no row {choice.row}: the {what} data have {len(prompts)}", fix="count from 0")
        )
    prompt = prompts[choice.row]
    changes: dict[str, int | str] = {} if choice.seed is None else {"seed": choice.seed}
    if choice.environment is not None:
        if choice.environment not in environment.named:
            known = ", ".join(environment.named) or "none"
            problem = f"there is no environment {choice.environment!r} in environment.named (it has: {known})"
            raise ConfigError(Problem(problem, fix=did_you_mean(choice.environment, environment.named, listed=True)))
        changes |= {environment.column: choice.environment}
    return replace(prompt, extra_info={**prompt.extra_info, **changes})
