"""The worlds of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.backends.environments.groups import GroupHost, SeatedHost
from posttrain.backends.environments.inline import InlineHost
from posttrain.backends.environments.open.http import TokenTexts
from posttrain.backends.environments.open.start import start_open, trains_own_distributions
from posttrain.backends.environments.processes import ProcessHost
from posttrain.config import RunConfig
from posttrain.config.environment import OPEN, EnvironmentConfig
from posttrain.data.images import PromptImageReader
from posttrain.data.raw_prompts import raw_prompt_ids
from posttrain.data.tool_forms import DEFAULT, chosen_form
from posttrain.data.tool_forms.written import decoded
from posttrain.data.turn_images import TurnImages
from posttrain.data.turns import OneMessageTurns, TemplateTurns
from posttrain.errors import ConfigError, DataError, Problem
from posttrain.interfaces.env import EnvHost, EnvSpec, ScoringHost
from posttrain.interfaces.worlds import EpisodeRules, TurnWriter, Worlds
from posttrain.processes.environment import names_in
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ENVS, ROLLOUT_ENGINES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SHOWN = 5
Processes = TypeVar("Processes", bound=ProcessHost)


def start_worlds(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    positions: float,
    prompts: Sequence[Prompt],
    processor: PromptImageReader | None = None,
    folder: Path | None = None,
    *,
    played_here: bool = False,
) -> Worlds:
    """Build the host, the turn writer and the rules of this run's episodes. Processes start with the first episode.

    Args: positions, those of the model; prompts, all that will be played; processor, the image processor of a vision model;
        folder of the run, without which it cannot be open to programs outside; played_here: the environments that score the
        conversations of an open run play these episodes.
    Raises: ConfigError when a turn does not fit into the model; DataError when a row names an environment that is not there.
    """
    environment = config.environment
    check_rows(environment, prompts, played_here=played_here)
    turn = max(config.rollout.max_response_tokens, config.validation.max_response_tokens or 0)
    longest = environment.max_context_tokens
    whole = environment.max_sequence_tokens
    if whole is not None and whole > positions:
        what = f"sequences of up to {whole} tokens do not fit into the {positions:.0f} positions of the model"
        field = "environment.max_sequence_tokens"
        raise ConfigError(Problem(what, fix=f"lower {field}", field=field))
    if longest is not None and whole is None and longest + turn > positions:
        what = (
            f"a context of up to {longest} tokens and a turn of up to {turn} do not fit into the {positions:.0f} "
            "positions of the model"
        )
        fix = "lower environment.max_context_tokens, or give environment.max_sequence_tokens"
        raise ConfigError(Problem(what, fix=fix, field="environment.max_context_tokens"))
    if longest is None:
        longest = int(min(positions, 2**31)) - turn if whole is None else whole - 1
    host, notes = (
        (_own_host(config), ()) if played_here and not plays_groups(environment) else _host(config, tokenizer, folder)
    )
    check_loading(environment, host)
    return Worlds(
        host=host,
        writer=writer_of(config, tokenizer, processor),
        rules=EpisodeRules(
            max_response_tokens=config.rollout.max_response_tokens,
            max_context_tokens=longest,
            max_trajectory_tokens=environment.max_trajectory_tokens,
            max_sequence_tokens=whole,
            max_turns=environment.max_turns if environment.end_at_max_turns else None,
            sample_per_turn=environment.sample_per_turn,
            reward_of=environment.reward_of,
            changed_history=environment.changed_history,
        ),
        spec_of=partial(spec_of, environment, tool_call_form=form_of(config, tokenizer), honours=honoured(config)),
        notes=tuple(notes),
    )


def _host(config: RunConfig, tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> tuple[EnvHost, Sequence[str]]:
    """Return the host of a run's environments, and notes for the user."""
    environment = config.environment
    if environment.name == OPEN:
        if folder is None:
            what = "programs outside play the environment open, and only posttrain train is open to them"
            raise ConfigError(Problem(what, fix="name another environment", field="environment.name"))
        form = form_of(config, tokenizer)
        return start_open(
            config,
            folder,
            _sampling(config),
            TokenTexts(
                text_of=lambda token: str(tokenizer.decode([token], skip_special_tokens=False)),
                decode=lambda token_ids: decoded(tokenizer, token_ids, form),
                encode=partial(raw_prompt_ids, tokenizer),
                form=form,
            ),
            _own_host(config) if environment.named else None,
        )
    if plays_groups(environment):
        return GroupHost(_processes(config, SeatedHost)), ()
    return _own_host(config), ()


def plays_groups(environment: EnvironmentConfig) -> bool:
    """Return True when the run's environment plays all episodes of a group in one process."""
    name = environment.name
    return name is not None and ENVS.is_built_in(name) and ENVS.facts(name).in_groups


def validating(config: RunConfig) -> RunConfig:
    """Return the configuration of the worlds of the validation, of environments that play in groups."""
    environment = config.environment
    settings = {**environment.settings, "validates": True}
    return config.model_copy(update={"environment": environment.model_copy(update={"settings": settings})})


def _own_host(config: RunConfig) -> ScoringHost:
    """Return the host of environments that the run itself plays, or that score conversations."""
    return _processes(config, ProcessHost) if config.environment.workers else InlineHost()


def _processes(config: RunConfig, kind: type[Processes]) -> Processes:
    environment = config.environment
    code = own_code(environment)
    settings = [environment.settings, *(each.settings for each in environment.named.values())]
    return kind(
        environment.workers,
        environment.timeout_s,
        sorted(name for name in code if ":" not in name),
        own=sorted(name for name in code if ":" in name),
        modules=config.model.external_modules,
        tools=[tool for each in settings for tool in built_in_tools(each)],
        memory_gib=environment.memory_gib,
        variables=[*environment.environment_variables, *names_in(settings)],
    )


def own_code(environment: EnvironmentConfig) -> dict[str, str]:
    """Return the environments of a run, and the code of the user's own that their settings name, each with its field."""
    code = {} if environment.name is None else {environment.name: "environment.name"}
    code |= dict.fromkeys(own_code_in(environment.settings), "environment.settings")
    for tag, each in environment.named.items():
        field = f"environment.named.{tag}"
        code |= {each.name: f"{field}.name"} | dict.fromkeys(own_code_in(each.settings), f"{field}.settings")
    return code


def check_loading(environment: EnvironmentConfig, host: EnvHost) -> None:
    """Import all code that episodes need. Raises: ConfigError, with the host closed, when some of it cannot be imported."""
    code = own_code(environment)
    if failures := host.load(list(code)):
        host.close()
        raise ConfigError(
            [
                Problem(f"{name} cannot be loaded: {why}", field=code.get(name, "environment"))
                for name, why in failures.items()
            ]
        )


def writer_of(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, processor: PromptImageReader | None = None
) -> TurnWriter:
    options = config.data.chat_template_options
    if config.environment.conversation == "one_message":
        return OneMessageTurns(tokenizer, options)
    images = TurnImages(processor, config.data.max_image_pixels)
    close, form = config.environment.close_turns, form_of(config, tokenizer)
    return TemplateTurns(tokenizer, options, close_turns=close, images=images, form=form)


def form_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the form in which the model writes tool calls."""
    return chosen_form(config.environment.tool_call_form, getattr(tokenizer, "chat_template", None))


def honoured(config: RunConfig) -> tuple[str, ...]:
    """Return the options of turns that a run honours."""
    facts = ROLLOUT_ENGINES.facts(config.rollout.engine)
    own = trains_own_distributions(config)
    found = {
        "stop": facts.samplings_of_requests,
        "seed": facts.seeds_of_requests,
        "temperature": facts.samplings_of_requests and own,
        "grammar": facts.grammars_of_requests and own,
    }
    return tuple(name for name, honours in found.items() if honours)


def _sampling(config: RunConfig) -> SamplingParams:
    """Return the distribution of a run's turns."""
    rollout = config.rollout
    return SamplingParams(
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
    )


def spec_of(
    environment: EnvironmentConfig, prompt: Prompt, *, tool_call_form: str = DEFAULT, honours: Sequence[str] = ()
) -> EnvSpec:
    """Build the environment spec of a row: of the environment that it names in ``named``, else of the run's. In an open run the
    one in ``named`` scores what a program plays."""
    asked = prompt.extra_info.get(environment.column) if environment.named else None
    if asked is None and environment.name == OPEN:
        asked = environment.settings.get("scored_by")
    chosen = environment.named.get(str(asked)) if asked is not None else None
    name = chosen.name if chosen else environment.name
    assert name is not None  # check_rows
    return EnvSpec(
        name=name,
        settings=chosen.settings if chosen else environment.settings,
        messages=prompt.messages,
        row={**prompt.extra_info, "data_source": prompt.data_source, "ground_truth": prompt.ground_truth},
        max_turns=(chosen.max_turns if chosen else None) or environment.max_turns,
        tool_call_form=tool_call_form,
        honours=honours,
    )


def own_code_in(settings: Mapping[str, Any]) -> list[str]:
    """Classes and functions of the user's own that an environment's settings name: an agent's, tools and interactions."""
    found = [settings.get("function")]
    for entry in (*(settings.get("tools") or ()), *(settings.get("interactions") or ())):
        found += [entry.get("name"), entry.get("class_name")] if isinstance(entry, Mapping) else [entry]
    return [each for each in found if isinstance(each, str) and ":" in each]


def built_in_tools(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tools of this package that an environment's settings name, with their options."""
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in settings.get("tools") or ()]
    return [each for each in entries if isinstance(each, Mapping) and ":" not in str(each.get("name", ":"))]


def check_rows(environment: EnvironmentConfig, prompts: Sequence[Prompt], *, played_here: bool) -> None:
    """Raises: DataError with the first rows whose environment is not there. Args: as of ``start_worlds``."""
    if not environment.named:
        return
    others = environment.settings.get("scored_by") if played_here else environment.name
    known = ", ".join(environment.named)
    bad = []
    for prompt in prompts:
        asked = prompt.extra_info.get(environment.column)
        if asked is None and others is None:
            bad.append(f"{prompt.prompt_id} names none in column {environment.column}")
        elif asked is not None and str(asked) not in environment.named:
            bad.append(f"{prompt.prompt_id} names {asked!r}")
    if bad:
        more = f", and {len(bad) - MOST_SHOWN} more" if len(bad) > MOST_SHOWN else ""
        what = f"rows without an environment that is there (named: {known}): {', '.join(bad[:MOST_SHOWN])}{more}"
        field = "environment.settings.scored_by" if played_here else "environment.name"
        fix = f"add them to environment.named, or name one for all other rows with {field}"
        raise DataError(Problem(what, fix=fix, field="environment.named"))
