"""Domains: which reward scores which rows, and which groups are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.forks import file_of_class
from posttrain.dialects.roll.rules.judges import is_local_judge, judges
from posttrain.dialects.roll.rules.reward_workers import (
    BOXES,
    BOXES_COLUMN,
    CODE,
    CODE_COLUMNS,
    CODE_S,
    JUDGE,
    PLANNED_WORKERS,
    QWEN_PATCH,
    TESTS_COLUMN,
    WORKERS,
)
from posttrain.errors import did_you_mean, nearest
from posttrain.registry import REWARDS

_PROBS = "actor_train.data_args.domain_interleave_probs"
_OF_TURNS = "read in agentic pipelines, which have turns"
_UNREAD = {
    **{f"reward_normalization.{name}": "norm_mean_type and norm_std_type of the top level count in RLVR, in ROLL too"
       for name in ("grouping", "method", "norm_mean_type", "norm_std_type")},
    **dict.fromkeys(("episode_reward_weight", "step_reward_weight", "step_reward_gamma"), _OF_TURNS),
    **dict.fromkeys(("use_turn_scores", "max_steps_per_traj"), _OF_TURNS),
}  # fmt: skip


def rewards(keys: Reader) -> dict[str, Any]:
    """reward.terms: one or two for every domain."""
    for key, reason in _UNREAD.items():
        keys.ignore(key, reason)
    domains = [name for name, section in keys.section("rewards").items() if isinstance(section, dict)]
    for name, section in keys.section("rewards").items():
        if not isinstance(section, dict):
            keys.problem(f"rewards.{name} must be a section, not {section!r}", key=f"rewards.{name}",
                         fix="give it a worker_cls")  # fmt: skip
    if not domains and keys["is_pure_opd"] and keys.section("teacher"):
        return {}  # teachers alone are learned from
    if not domains:
        keys.problem(
            "there is no reward: rewards is empty", key="rewards",
            fix="add one, such as rewards: {math_rule: {worker_cls: "
            "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}",
        )  # fmt: skip
        return {}
    parts = _parts(keys, domains)
    terms = [
        term
        for name in domains
        if not is_local_judge(keys, name)
        for term in _terms(keys, name, alone=len(domains) == 1)
    ]
    fields = judges(keys, domains)
    if terms or fields:
        fields["reward.terms"] = terms
    if any(term["name"] == "math_rule" and "path" not in term for term in terms):
        fields["reward.overrun_is_zero"] = True  # "any failure is 0", of the rule's own time limit
    workers = [str(keys[f"rewards.{name}.worker_cls"]).rpartition(".")[2] for name in domains]
    if CODE in workers:
        fields |= _code(alone=len(domains) == 1)
    if BOXES in workers:
        fields["data.extra_columns"] = [*fields.get("data.extra_columns", []), BOXES_COLUMN]
    readers = [name for name, worker in zip(domains, workers, strict=True) if worker in (CODE, BOXES)]
    if readers:
        keys.origins["data.extra_columns"] = f"rewards.{readers[0]}.worker_cls"
    if keys["difficulty_loss_weight"]:
        fields["data.extra_columns"] = [*fields.get("data.extra_columns", []), "difficulty"]
    return fields | _group_filter(keys, list(parts) or domains, parts)


def _writes_pixels(keys: Reader) -> bool:
    """Return True for Qwen2.5-VL, which writes boxes in pixels of the image it reads; others write thousandths, as references
    are."""
    path = str(keys["actor_train.model_args.model_name_or_path"] or keys["pretrain"] or "")
    description = Path(path).expanduser() / "config.json"
    if not keys.skip_files and description.is_file():
        return '"qwen2_5_vl"' in description.read_text(encoding="utf-8", errors="replace")
    return "qwen2.5-vl" in path.lower().replace("_", ".")


def _code(*, alone: bool) -> dict[str, Any]:
    """Return the place of a program's tests, and their time limits: 20 s per test and 360 s for all, 80 % of CODE_S."""
    columns = {"data.ground_truth_column": TESTS_COLUMN} if alone else {}
    more = CODE_COLUMNS if alone else [TESTS_COLUMN, *CODE_COLUMNS]
    return {**columns, "data.extra_columns": more, "reward.timeout_s": CODE_S}


def _parts(keys: Reader, domains: list[str]) -> dict[str, int]:
    """Prompts of a step from each domain; empty where the step is of all rows as they come."""
    shares = keys[_PROBS]
    if not shares:
        if len(domains) > 1:
            keys.warn(f"without {_PROBS} a step draws from all rows as they come, and each is scored by its own domain's "
                      "reward; ROLL refuses that")  # fmt: skip
        return {}
    unknown = [name for name in shares if name not in domains]
    for name in unknown:
        keys.problem(f"the domain {name} has no reward", key=f"{_PROBS}.{name}",
                     fix=did_you_mean(name, domains) or f"add rewards.{name}")  # fmt: skip
    strange = [name for name, share in shares.items() if isinstance(share, bool) or not isinstance(share, int | float)]
    for name in strange:
        keys.problem(
            f"the share of {name} must be a number, not {shares[name]!r}", key=f"{_PROBS}.{name}", fix="such as 0.5"
        )
    if unknown or strange:
        return {}
    step = keys["rollout_batch_size"]
    counts = prompts_by_domain(shares, step)
    empty = [name for name, count in counts.items() if count < 1]
    if empty:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        keys.problem(
            f"{step} prompts are shared out as {told}: shares are of the step, and the last domain gets what is left",
            key=_PROBS, fix="use shares that add up to 1 and give every domain a prompt",
        )  # fmt: skip
        return {}
    if abs(sum(shares.values()) - 1) > 1e-6:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        keys.warn(f"{_PROBS} adds up to {sum(shares.values()):g}, and not to 1: a step has {told} prompts, because the last "
                  "domain gets what is left, in ROLL too")  # fmt: skip
    return counts if len(domains) > 1 else {}


def _domains(keys: Reader, parts: dict[str, int], filters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each domain's rows by their tags, prompts and filter; statistics are over domains, as in ROLL."""
    found: dict[str, Any] = {}
    for name, prompts in parts.items():
        chosen = {key.partition(".")[2]: value for key, value in filters[name].items()}
        found[name] = {"sources": keys[f"rewards.{name}.tag_included"], "prompts_per_step": prompts}
        if chosen:
            found[name]["group_filter"] = chosen
    return {"data.domains": found, "data.domain_statistics": len(parts) > 1}


def prompts_by_domain(shares: dict[str, float], prompts: int) -> dict[str, int]:
    """Prompts of a step from each domain: the share, cut down; the last gets the rest."""
    names = list(shares)
    counts = {name: int(shares[name] * prompts) for name in names[:-1]}
    return counts | {names[-1]: prompts - sum(counts.values())}


def _terms(keys: Reader, domain: str, *, alone: bool) -> list[dict[str, Any]]:
    at = f"rewards.{domain}"
    worker, tags, options = keys[f"{at}.worker_cls"], keys[f"{at}.tag_included"], keys.section(f"{at}.options")
    # Rows whose tag no domain includes belong to math_rule, so a single math_rule scores everything.
    sources = [] if alone and (domain == "math_rule" or not tags) else list(tags)
    if not sources and not alone:
        keys.problem(f"{at} includes no tag, and there are several domains", key=f"{at}.tag_included",
                     fix=f"use {at}.tag_included=[TAG, ...]")  # fmt: skip
    if worker is None:
        keys.problem(f"{at} has no worker_cls", key=f"{at}.worker_cls",
                     fix=f"use one of {', '.join(WORKERS)}, or a reward of this program, such as exact_match")  # fmt: skip
        return []
    path, _, function = worker.rpartition(":")
    name = worker.rpartition(".")[2]
    if path.endswith(".py") or path.startswith("pkg://"):
        found: tuple[tuple[str, dict[str, Any]], ...] = ((function, {}),)
    elif worker in REWARDS.names():
        path, found = "", ((worker, {}),)
    elif name in WORKERS:
        path, found = "", WORKERS[name]
        if name == CODE and not alone:  # the reference column is that of the other domains
            found = tuple((term, {**settings, "tests_in": TESTS_COLUMN}) for term, settings in found)
        if name == BOXES and _writes_pixels(keys):
            found = (("boxes", {"pixels_per_patch": QWEN_PATCH}),)
        if name == JUDGE:
            options = _judge(keys, at) | options
        if options and name not in (CODE, JUDGE):
            keys.ignore(f"{at}.options", f"read with a reward of this program or a file, and {name} is ROLL's")
            options = {}
    elif name in PLANNED_WORKERS:
        keys.plan_only(f"{at}.worker_cls={name} is planned: {PLANNED_WORKERS[name]}", key=f"{at}.worker_cls")
        return []
    else:
        return _unknown_worker(keys, f"{at}.worker_cls", worker, name)
    if name != JUDGE:
        for key in ("model_name", "api_url", "api_key"):
            keys.ignore(f"{at}.judge_{key}", f"read by {JUDGE} only")
    kind = keys[f"{at}.reward_type"]
    if name == "CrossThinkQARuleRewardWorker" and kind is None:
        keys.problem(
            f"{at} needs a reward_type", key=f"{at}.reward_type", fix=f"use {at}.reward_type=loose, soft or strict"
        )
    if name != "CrossThinkQARuleRewardWorker":
        keys.ignore(f"{at}.reward_type", "read by crossthinkqa only")
    terms = []
    for term, settings in found:
        given = {"reward_type": kind} if term == "crossthinkqa" and name in WORKERS and kind else {}
        one: dict[str, Any] = {"name": term, "options": {**settings, **given, **options}, "data_sources": sources}
        terms.append(one | ({"path": path} if path else {}))
    return terms


def _judge(keys: Reader, at: str) -> dict[str, Any]:
    """Options of llm_judge."""
    if not (keys[f"{at}.judge_api_url"] and keys[f"{at}.judge_model_name"]):
        keys.problem(f"{at} needs judge_api_url and judge_model_name", key=f"{at}.worker_cls",
                     fix="such as judge_api_url: http://judge:8000/v1")  # fmt: skip
    options = {"base_url": keys[f"{at}.judge_api_url"] or "", "model": keys[f"{at}.judge_model_name"] or ""}
    variable = keys[f"{at}.judge_api_key"]
    if variable in (None, "", "EMPTY"):
        return options
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", variable):  # not repeated: it may be the key
        keys.problem(f"{at}.judge_api_key holds a key, which would be saved with the run", key=f"{at}.judge_api_key",
                     fix="put the key into an environment variable and name that, such as judge_api_key: JUDGE_KEY")  # fmt: skip
        return options
    return options | {"api_key_env": variable}


def _unknown_worker(keys: Reader, key: str, worker: str, name: str) -> list[dict[str, Any]]:
    own = file_of_class(keys, worker)
    guess = None if own else nearest(name, [*WORKERS, *PLANNED_WORKERS, *REWARDS.names()])
    instead = f"did you mean {guess}?" if guess else "write your reward as a function and name it FILE.py:FUNCTION"
    if "." in worker and guess is None:
        place = f" ({own})" if own else ""
        keys.plan_only(f"{key}={worker} is planned: reward workers of your own{place}", key=key, fix=instead)
    else:
        keys.problem(f"there is no reward {worker!r}", key=key, fix=instead)
    return []


def _group_filter(keys: Reader, domains: list[str], parts: dict[str, int]) -> dict[str, Any]:
    """Dynamic sampling by query_filter_config, of each domain, or leaving groups out by difficulty_mask."""
    filters = {name: _query_filter(keys, name) for name in domains}
    shared = (
        _domains(keys, parts, filters) if parts and all(keys[f"rewards.{name}.tag_included"] for name in parts) else {}
    )
    chosen = next((each for each in filters.values() if each), {}) if shared else next(iter(filters.values()))
    if not shared and any(other != chosen for other in filters.values()):
        name = next(name for name, other in filters.items() if other != chosen)
        keys.plan_only("different filters for different domains are planned without shares of a step",
                       key=f"rewards.{name}.query_filter_config.type",
                       fix=f"give all domains the same filter, or each its share in {_PROBS}")  # fmt: skip
    mask = keys["difficulty_mask"]
    for key in ("difficulty_low_threshold", "difficulty_high_threshold"):
        if not mask:
            keys.ignore(key, "difficulty_mask is false")
    if not mask:
        return shared or chosen
    if chosen:
        keys.plan_only(
            "difficulty_mask beside a query filter is planned", key="difficulty_mask", fix="keep one of the two"
        )
        return shared or chosen
    if keys["num_return_sequences_in_group"] == 1:
        keys.ignore("difficulty_mask", "with 1 response per prompt it masks nothing, in ROLL too")
        return shared
    return shared | {
        "group_filter.strategy": "mask",
        "group_filter.above_std": None,
        "group_filter.above_mean": keys["difficulty_low_threshold"],
        "group_filter.below_mean": keys["difficulty_high_threshold"],
    }


def _query_filter(keys: Reader, domain: str) -> dict[str, Any]:
    at = f"rewards.{domain}.query_filter_config"
    kind = keys[f"{at}.type"]
    down, up, std = (keys[f"{at}.filter_args.{name}"] for name in ("threshold_down", "threshold_up", "std_threshold"))
    readers = {"mean_filter": ("threshold_down", "threshold_up"), "std_filter": ("std_threshold",)}.get(kind, ())
    for name in ("threshold_down", "threshold_up", "std_threshold"):
        if name not in readers:
            keys.ignore(f"{at}.filter_args.{name}", f"{kind} does not read it")
    if kind == "no_filter":
        return {}
    if keys["num_return_sequences_in_group"] == 1:
        keys.ignore(f"{at}.type", "groups of 1 response are never filtered, in ROLL too")
        return {}
    if kind == "std_filter":
        if std < 0:
            keys.warn(
                f"{at} keeps every group: no standard deviation is below {std:g}; 0 drops groups of equal rewards"
            )
            return {}
        return {"group_filter.strategy": "refill", "group_filter.above_std": std}
    if up is not None and down >= up:
        keys.problem(f"no group has a mean above {down:g} and below {up:g}", key=f"{at}.filter_args.threshold_down",
                     fix="use threshold_down below threshold_up, such as 0 and 1")  # fmt: skip
        return {}
    return {
        "group_filter.strategy": "refill",
        "group_filter.above_std": None,
        "group_filter.above_mean": down,
        "group_filter.below_mean": up,
    }
