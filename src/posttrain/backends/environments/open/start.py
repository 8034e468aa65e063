"""Start the endpoint of an open run."""

from __future__ import annotations

import inspect
import os
import secrets
from pathlib import Path
from typing import Any

from posttrain.backends.environments.open.host import OpenHost
from posttrain.backends.environments.open.http import OpenServer, TokenTexts
from posttrain.backends.environments.open.journal import FILE, Journal
from posttrain.config import RunConfig
from posttrain.config.roles import compares_vocabularies
from posttrain.data.openai_api.own_sampling import DISTRIBUTION, Honours
from posttrain.envs.agent.listener import RUN_HONOURS
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import ScoringHost
from posttrain.plan.engine import engine_plan
from posttrain.records.trajectories import SamplingParams
from posttrain.registry import ENVS, ROLLOUT_ENGINES
from posttrain.run.checkpoint_folders import steps_in

TOKEN = "endpoint_token"  # the file in the run folder


def start_open(
    config: RunConfig, folder: Path, sampling: SamplingParams, tokens: TokenTexts, scorer: ScoringHost | None
) -> tuple[OpenHost, list[str]]:
    """Listen for programs outside. Returns: the host of their episodes, and what a client sets, for the user.

    Args: sampling, the run's; scorer, the host of environments that score conversations.
    Raises: ConfigError when it cannot listen, or the token cannot be read or written.
    """
    # The settings, with the defaults that stand where they are registered.
    defaults = inspect.signature(ENVS.get("open")).parameters.values()
    settings: dict[str, Any] = {each.name: each.default for each in defaults if each.kind is each.KEYWORD_ONLY}
    settings |= config.environment.settings
    token, file = _token(settings["token_file"], folder)
    try:
        checkpoints = Path(config.checkpoint.folder) if config.checkpoint.folder else folder / "checkpoints"
        journal = Journal(folder, saved_step=max(steps_in(checkpoints), default=0))
    except OSError as error:
        what = f"{folder / FILE} cannot be read or written: {error.strerror or error}"
        raise ConfigError(Problem(what, field="run.folder")) from None
    host = OpenHost(
        conversation_timeout_s=settings["conversation_timeout_s"],
        group_timeout_s=settings["group_timeout_s"],
        wait_s=settings["wait_s"],
        has_rows=bool(config.data.train_files),
        group_size=config.rollout.samples_per_prompt,
        journal=journal,
        scorer=scorer,
        decode=tokens.decode,
        compared=bool(settings["compare_observations"]),
        ends_after_s=settings["ends_after_s"],
    )
    address, port = str(settings["host"]), int(settings["port"])
    try:
        server = OpenServer(
            host,
            address,
            port,
            token=token,
            sampling=sampling,
            honours=_honours(config, any_sampling=bool(settings["any_sampling"])),
            tokens=tokens,
        )
    except OSError as error:
        what = f"cannot listen at {address}:{port}: {error.strerror or error}"
        fix = "use another port, or 0 for a free one"
        raise ConfigError(Problem(what, fix=fix, field="environment.settings.port")) from None
    lost = journal.summary()
    notes = [f"open to programs: OPENAI_BASE_URL={server.url}/v1, OPENAI_API_KEY is in {file}"]
    return host, [*notes, lost] if lost else notes


def _honours(config: RunConfig, *, any_sampling: bool) -> Honours:
    """Return what the run takes of requests, which depends on its sampler and on what it can train."""
    facts, own = ROLLOUT_ENGINES.facts(config.rollout.engine), trains_own_distributions(config)
    continued = (
        config.asynchronous.mode == "colocate"
    )  # with newer weights, for which a prompt's log-probs are not kept
    return Honours(
        stops=facts.samplings_of_requests,
        seeds=facts.seeds_of_requests,
        tops=facts.reports_top_logprobs,
        grammars=facts.grammars_of_requests and own,
        distributions=frozenset({"temperature"}) if facts.samplings_of_requests and own else frozenset(),
        echoes=facts.prompt_logprobs_of_requests and not continued,
        ignored=frozenset({*DISTRIBUTION, "seed"}) if any_sampling else frozenset(),
        **RUN_HONOURS,
    )


def trains_own_distributions(config: RunConfig) -> bool:
    """Return True where tokens that were drawn from another distribution than the run's are scored under theirs: comparisons
    over the whole vocabulary, and engines with their own scoring, know that of the run alone."""
    scores = engine_plan(config.policy.engine).scores_own_distributions
    return scores and not compares_vocabularies(config) and not config.distillation.teachers


def _token(file: str | None, folder: Path) -> tuple[str, Path]:
    """The token in the file, or one that is kept in the run folder, so that clients outlive a restart of the run."""
    path = folder / TOKEN if file is None else Path(file).expanduser()
    try:
        if file is None and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as out:
                    out.write(secrets.token_urlsafe(24).encode() + b"\n")
            except OSError:
                path.unlink(missing_ok=True)  # an empty one would stop the next start, too
                raise
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"the token of the endpoint cannot be read or written: {error}"
        raise ConfigError(Problem(what, field="environment.settings.token_file")) from None
    if not token:
        raise ConfigError(
            Problem(f"{path} is empty", fix="write a token into it", field="environment.settings.token_file")
        )
    return token, path
