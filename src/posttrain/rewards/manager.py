"""A user's own reward manager, a class written for verl, as a batched term: called with all responses of a step.

The class gets a ``DataProto`` of token ids and returns a tensor of rewards on tokens; a response's reward is the sum of its row.
 A class with ``run_single``, verl's reward loop, is called with one row at a time.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.reward import RewardTerm
from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.interfaces.reward import BatchedRewardFn
from posttrain.libraries.verl import modules as verl_modules
from posttrain.libraries.verl.actors import calls_ray, provide_ray
from posttrain.records.prompts import Prompt
from posttrain.rewards.user import UserRewardError, check_function, find_function
from posttrain.user_files import (
    bound_names,
    defined_at,
    failed_at,
    import_path,
    last_line,
    parse_file,
    place_of,
    source_file,
)
from posttrain.verl_rows import columns_read

TokenizerOf = Callable[[], Any]
REGISTRIES = ("verl.workers.reward_manager", "verl.experimental.reward_loop.reward_manager")
# Parameters that forks call the step's number
STEPS = ("step", "global_step", "global_steps", "training_step")
TOKEN_REWARDS = "token_rewards"  # logged: the number of tokens that got a reward, where it is more than the last


def check_manager(term: RewardTerm) -> None:
    """Check, without running it, that the file defines or registers the manager. Raises: ConfigError."""
    assert term.path is not None
    tree = parse_file(term.path, source_file(term.path, holds="your reward manager"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    registered = [name for node in classes.values() for name in _registered_names(node)]
    known = [*registered, *classes]
    if term.name not in known and not {term.name, "*"} & bound_names(tree):
        what = f"{term.path} neither defines nor registers a reward manager {term.name!r}"
        what += f" (it has: {', '.join(known) or 'no class'})"
        raise ConfigError(Problem(what, fix=did_you_mean(term.name, known, listed=True)))
    if term.scores_with is not None:
        check_function(*_split(term.scores_with))


def load_manager(term: RewardTerm, tokenizer: TokenizerOf | None) -> BatchedRewardFn:
    """Construct the manager with those of verl's arguments that it takes: tokenizer, num_examine=0, compute_score, reward_fn_key,
    config, and the term's options. ``compute_score`` is None where the term or the manager's file asks for its own.

    Raises: ConfigError, with the user's own file and line; any error of the class.
    """
    check_manager(term)
    assert term.path is not None
    if tokenizer is None:
        raise ConfigError(Problem("a reward manager needs a run's tokenizer, and this command loads none"))
    file = source_file(term.path)
    verl_modules.provide(verl_around(file))
    if calls_ray(parse_file(term.path, file)):
        provide_ray()
    made = _find(term.path, term.name)
    options = {name: _attributes(value) for name, value in term.options.items()}
    own_score = term.scores_with is None and (term.own_score or _names_old_default(made))
    config = {"reward_model": {"reward_kwargs": term.options}, "data": {"reward_fn_key": "data_source"}}
    offered = {
        "tokenizer": tokenizer(),
        "num_examine": 0,
        "compute_score": None if own_score and _has_own_score(made) else _compute_score(term),
        "reward_fn_key": "data_source",
        "config": config,
        "reward_router_address": None,
        "reward_model_tokenizer": None,
        **options,
    }
    try:
        manager = made(**_taken(made, offered, options))
    except (Exception, SystemExit) as error:
        what = f"{place_of(error, str(file))}: {term.name} could not be constructed: {last_line(error)}"
        raise ConfigError(Problem(what)) from error
    return Managed(manager, file)


class Managed:
    """Calls a manager, and reads a reward per response from its answer. ``file`` is that of its class."""

    def __init__(self, manager: Any, file: Path):
        self._manager, self._file = manager, str(file)
        self._columns = columns_read(parse_file(self._file, file))

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Any]) -> list[Mapping[str, Any]]:
        from posttrain.libraries.verl.protocol import scored_batch  # imports torch

        batch = scored_batch(_rows(prompts, responses, self._columns))
        try:
            if hasattr(self._manager, "run_single"):
                return asyncio.run(_one_by_one(self._manager, batch))
            answer = _called(self._manager, batch, responses[0].get("step") if responses else None)
        except (Exception, SystemExit) as error:  # a user's program may fail in any way
            raise UserRewardError(f"{failed_at(error, type(self._manager))}: {last_line(error)}") from error
        # Behind a fork's rewards stand further values for its loop
        answer = answer[0] if isinstance(answer, tuple) and answer else answer
        extra = answer.get("reward_extra_info") or {} if isinstance(answer, Mapping) else {}
        rewards: Any = answer.get("reward_tensor") if isinstance(answer, Mapping) else answer
        shape = tuple(batch.batch["responses"].shape)
        found = getattr(rewards, "shape", None)
        if found is None or tuple(found) != shape:
            what = f"a {type(answer).__name__} without rewards" if found is None else f"rewards of shape {tuple(found)}"
            raise UserRewardError(f"{defined_at(type(self._manager))}: it returned {what}; {shape} is expected")
        return [_result(rewards[number], number, extra, len(prompts)) for number in range(len(prompts))]


def verl_around(file: Path) -> Path | None:
    """Return the package verl of a checkout that a file stands in; None for another file."""
    return next((each for each in file.parents if each.name == "verl" and (each / "__init__.py").is_file()), None)


def _attributes(value: Any) -> Any:
    """A section as verl hands it over: its entries are attributes, too."""
    if not isinstance(value, Mapping):
        return value
    from omegaconf import OmegaConf

    return OmegaConf.create(dict(value))


def _called(manager: Any, batch: Any, step: int | None) -> Any:
    """Ask for a mapping, where the manager takes that, as verl does; a fork's that takes the step gets its number."""
    parameters = inspect.signature(manager.__call__).parameters
    takes = "return_dict" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given: dict[str, Any] = {"return_dict": True} if takes else {}
    given |= {name: step for name in STEPS if name in parameters and step is not None}
    return manager(batch, **given)


async def _one_by_one(manager: Any, batch: Any) -> list[Mapping[str, Any]]:
    found = await asyncio.gather(*(manager.run_single(batch[[number]]) for number in range(len(batch))))
    return [{**(each.get("reward_extra_info") or {}), "score": each["reward_score"]} for each in found]


def _result(row: Any, number: int, extra: Mapping[str, Sequence[Any]], count: int) -> dict[str, Any]:
    beside = {name: values[number] for name, values in extra.items() if len(values) == count and name != "score"}
    rewarded = int((row != 0).sum())
    return {**beside, **({TOKEN_REWARDS: rewarded} if rewarded > 1 else {}), "score": float(row.sum())}


def _rows(prompts: Sequence[Prompt], responses: Sequence[Any], columns: Sequence[str]) -> dict[str, Any]:
    """The batch in plain values; of further ``columns``, those that a row has (data.extra_columns)."""
    there = [name for name in columns if any(name in prompt.extra_info for prompt in prompts)]
    return {
        **{name: [each[name] for each in responses] for name in ("prompt_ids", "response_ids", "response_mask")},
        "objects": {
            "data_source": [prompt.data_source for prompt in prompts],
            "reward_model": [{"style": "rule", "ground_truth": prompt.ground_truth} for prompt in prompts],
            "extra_info": [dict(prompt.extra_info) for prompt in prompts],
            "uid": [prompt.prompt_id for prompt in prompts],
            "index": [prompt.extra_info.get("index", 0) for prompt in prompts],
            "raw_prompt": [list(prompt.messages) for prompt in prompts],
            **{name: [prompt.extra_info.get(name) for prompt in prompts] for name in there},
        },
    }


def _find(path: str, name: str) -> type:
    """Return the class of this name, or the one that the file registers under it. Raises: ConfigError."""
    module = import_path(path)
    made = getattr(module, name, None)
    for registry in REGISTRIES:
        if isinstance(made, type):
            return made
        try:
            made = importlib.import_module(registry).get_reward_manager_cls(name)
        except (ImportError, AttributeError, ValueError, AssertionError, KeyError):
            continue
    if not isinstance(made, type):
        raise ConfigError(Problem(f"{path} registers no reward manager {name!r}"))
    return made


def _compute_score(term: RewardTerm) -> Any:
    """Return the function that a manager calls as ``compute_score``."""
    if term.scores_with is None:
        scores = importlib.import_module("verl.utils.reward_score")
        names = ("default_compute_score", "_default_compute_score")  # the second one up to verl 0.3
        return _one_or_many(next(found for name in names if (found := getattr(scores, name, None)) is not None))
    path, name = _split(term.scores_with)
    function, _ = find_function(path, name)  # the manager calls it, with arguments of its own
    options = dict(term.scores_with_options)
    return lambda *positional, **named: function(*positional, **{**named, **options})


def _one_or_many(score: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a manager of batches can call too, with lists: each response is then scored by itself."""

    def compute_score(*positional: Any, **named: Any) -> Any:
        if "solution_strs" not in named:
            return score(*positional, **named)
        texts, extra = named["solution_strs"], named.get("extra_infos")
        rows = zip(
            named["data_sources"],
            texts,
            named["ground_truths"],
            [None] * len(texts) if extra is None else extra,
            strict=True,
        )
        return [
            score(data_source=source, solution_str=text, ground_truth=truth, extra_info=info)
            for source, text, truth, info in rows
        ]

    return compute_score


def _names_old_default(made: type) -> bool:
    """Find ``_default_compute_score``, the default's name up to verl 0.3, beside the constructor: it was written for these."""
    return "_default_compute_score" in getattr(made.__init__, "__globals__", {})  # type: ignore[misc]


def _has_own_score(made: type) -> bool:
    found = inspect.signature(made).parameters.get("compute_score")
    return found is not None and found.default is None


def _split(where: str) -> tuple[str, str]:
    path, _, name = where.rpartition(":")
    return path, name


def _taken(made: type, offered: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a class takes; those of ``options`` are given in any case, so that a wrong one is reported."""
    parameters = inspect.signature(made).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        ours = {"config", "reward_router_address", "reward_model_tokenizer"}
        names = {each.name for each in parameters}
        return {name: value for name, value in offered.items() if name not in ours or name in names}
    names = {each.name for each in parameters}
    return {name: value for name, value in offered.items() if name in names or name in options}


def _registered_names(node: ast.ClassDef) -> list[str]:
    """Return the names in decorators of the form ``register("name")``, which may be imported as ``register_manager``."""
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call) and each.args]
    return [
        str(call.args[0].value)
        for call in calls
        if isinstance(call.args[0], ast.Constant)
        and "register" in getattr(call.func, "id", getattr(call.func, "attr", ""))
    ]
