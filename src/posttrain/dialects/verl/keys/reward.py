"""Keys of reward, reward_model and custom_reward_function about functions and managers: how responses are scored by code."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned, refused

MANAGERS = Literal["naive", "prime", "dapo", "batch"]


def _sandbox(section: str, since: str, default: object = ABSENT) -> tuple[Key, ...]:
    """A server that runs model-written code, which verl asks about codecontests, apps, codeforces and taco."""
    ours = "programs run in boxes on this machine (docs/sandbox.md), with limits of the reward code's own"
    why = "model-written code runs in boxes on this machine (docs/sandbox.md), and no sandbox server is asked; a server that "
    why += "scores whole responses can be the reward http"
    at_once, memory = (ABSENT, ABSENT) if default is ABSENT else (64, 1024)
    return (
        refused(f"{section}.url", str | None, default, why, "address of a sandbox server", since=since),
        ignored(f"{section}.max_concurrent", int, at_once, ours, "programs at once, on that server", since=since),
        ignored(f"{section}.memory_limit_mb", int, memory, ours, "memory of each, MB", since=since),
    )


_FUNCTION: tuple[Key, ...] = (
    mapped(
        "custom_reward_function.path",
        str | None,
        None,
        "reward.terms",
        "Python file (or pkg://module) with your reward function",
        by_rule=True,
        change="with its name, one reward term; null: the scorer of each prompt's data source",
        since="0.4",
    ),
    mapped(
        "custom_reward_function.name",
        str,
        "compute_score",
        "reward.terms",
        "name of the function in that file",
        by_rule=True,
        change="without a path, the name of a reward built in here",
        since="0.4",
    ),
    mapped(
        "custom_reward_function.reward_kwargs",
        dict | None,
        ABSENT,
        "reward.terms",
        "further arguments of the function; they win over the call's own",
        by_rule=True,
        change="options of the reward term",
        since="0.4",
    ),
    mapped(
        "custom_reward_function.reward_kwargs.**",
        Any,
        ABSENT,
        "reward.terms",
        "one of them",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_manager",
        MANAGERS,
        "naive",
        "reward.overlong_buffer_tokens reward.terms",
        "how scorers are called: naive, prime (in parallel), dapo (with a penalty for long responses), batch",
        by_rule=True,
        change="dapo: reward_kwargs.overlong_buffer_cfg counts; batch: your function is called with lists; naive and prime are "
        "the same here",
        note="A scorer that fails gives 0 with prime in verl; here the response is without a reward and leaves the gradient.",
    ),
    mapped(
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        bool,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "dapo: take reward from responses that come near the limit",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_kwargs.overlong_buffer_cfg.len",
        int,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "dapo: the last so many tokens before the limit cost",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        float,
        ABSENT,
        "reward.overlong_penalty",
        "dapo: what the longest response loses",
        by_rule=True,
        since="0.4",
    ),
    ignored(
        "reward_model.reward_kwargs.overlong_buffer_cfg.log",
        bool,
        ABSENT,
        "the penalty is always logged",
        "dapo: log the penalty",
        since="0.4",
    ),
    ignored(
        "reward_model.reward_kwargs.max_resp_len",
        int,
        ABSENT,
        "it is the longest response, data.max_response_length; another number is refused",
        "dapo: longest response, tokens",
        since="0.4",
    ),
    planned(
        "reward_model.reward_kwargs.**",
        Any,
        ABSENT,
        "other arguments of a reward manager",
        "arguments of the reward manager",
        since="0.4",
    ),
    mapped(
        "reward_model.overlong_buffer.enable",
        bool,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "the DAPO recipe's name of overlong_buffer_cfg.enable",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward_model.overlong_buffer.len",
        int,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "the same of len",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward_model.overlong_buffer.penalty_factor",
        float,
        ABSENT,
        "reward.overlong_penalty",
        "the same of penalty_factor",
        by_rule=True,
        since="later",
    ),
    ignored(
        "reward_model.overlong_buffer.log",
        bool,
        ABSENT,
        "the penalty is always logged",
        "the same of log",
        since="later",
    ),
    ignored(
        "reward_model.launch_reward_fn_async",
        bool,
        False,
        "scoring has its own place in a step, and takes little of it",
        "score while log-probs are computed",
        since="0.4",
    ),
    *_sandbox("reward_model.sandbox_fusion", "0.4", None),
)

_LATER: tuple[Key, ...] = (
    mapped(
        "reward.custom_reward_function.path",
        str | None,
        ABSENT,
        "reward.terms",
        "the later name of custom_reward_function.path",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward.custom_reward_function.name",
        str,
        ABSENT,
        "reward.terms",
        "the later name of custom_reward_function.name",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward.reward_manager.name",
        MANAGERS,
        ABSENT,
        "reward.overlong_buffer_tokens reward.terms",
        "the later name of reward_model.reward_manager",
        by_rule=True,
        since="later",
    ),
    planned(
        "reward.reward_manager.source",
        str,
        ABSENT,
        "reward managers of your own",
        "where the manager comes from",
        off=("register",),
        since="later",
    ),
    planned("reward.reward_manager.module.**", Any, ABSENT, "reward managers of your own", "its file", since="later"),
    mapped("reward.num_workers", int, ABSENT, "reward.workers", "processes that score", by_rule=True, since="later"),
    *_sandbox("reward.sandbox_fusion", "later"),
    *_sandbox("sandbox_fusion", "later"),
    mapped(
        "reward_model.num_workers", int, ABSENT, "reward.workers", "processes that score", by_rule=True, since="later"
    ),
    mapped(
        "reward_model.reward_kwargs.num_processes",
        int,
        ABSENT,
        "reward.workers",
        "prime: processes that score",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_kwargs.timeout",
        int | float,
        ABSENT,
        "reward.timeout_s",
        "prime: limit of scoring one response, seconds",
        by_rule=True,
        since="0.4",
    ),
)

ROWS: tuple[Key, ...] = (*_FUNCTION, *_LATER)
