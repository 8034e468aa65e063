"""Reward functions from the user's own Python file, or from an installed module (pkg://)."""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.descriptions import signature_of
from posttrain.errors import ConfigError, PosttrainError, Problem, did_you_mean
from posttrain.interfaces.reward import BatchedRewardFn, RewardFn
from posttrain.libraries.verl import modules as verl_modules
from posttrain.records.prompts import Prompt
from posttrain.user_files import (
    bound_names,
    defined_at,
    import_path,
    last_line,
    parse_file,
    place_of,
    source_file,
)

# Keyword arguments of a function: verl's compute_score.
KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
# Values that a function with other parameter names gets by position, by how many of them it needs.
POSITIONAL = {2: ("solution_str", "ground_truth"), 4: KEYWORDS}
# Names of a first parameter that wants something else than the response, which it would get by position.
PROMPTS = ("prompt", "prompts", "question", "query", "problem", "instruction")
_TEXT = re.compile(r"prompt|question|response|answer|solution|completion|output|pred", re.I)
# Keyword arguments of a batched function.
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

JUDGE_TOKENIZER = "reward_model_tokenizer"  # verl's name of a parameter

REWARD_FUNCTION = "your reward function"


class UserRewardError(PosttrainError):
    """The user's function raised; the message names the user's own file and line."""


def check_function(
    path: str,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    batched: bool = False,
    has_judge: bool = False,
) -> None:
    """Check, without running it, that the file or module exists, is Python, and defines ``name``; with ``options`` also that it
    can be called as ``load_function`` calls it (``batched``: ``load_batched_function``; ``has_judge``: with a tokenizer).

    Raises: ConfigError.
    """
    tree = parse_file(path, source_file(path, holds=REWARD_FUNCTION))
    functions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if (node := functions.get(name)) is not None and options is not None and not node.decorator_list:
        signature = signature_of(node)
        judged = {JUDGE_TOKENIZER: None} if has_judge and JUDGE_TOKENIZER in signature.parameters else {}
        (_check_batched if batched else _passed)(signature, path, name, {**options, **judged})
    if name not in functions and not {name, "*"} & bound_names(tree):
        what = f"{path} defines no {name!r} (it defines: {', '.join(functions) or 'no function'})"
        raise ConfigError(Problem(what, fix=did_you_mean(name, functions, listed=True)))


def load_function(
    path: str,
    name: str,
    options: Mapping[str, Any],
    extra_info: Mapping[str, Any] | None = None,
    judge_tokenizer: str | None = None,
) -> RewardFn:
    """Build a reward from the function ``name`` in the file or module, called with those of KEYWORDS that it takes and with
    ``options`` (which take precedence, as in verl). A function with other parameter names is called by position: with all four
    values, or, when it takes two, with the response and the reference answer.

    The function returns a number, or a mapping with its number under "score"; other numbers in the mapping are logged. It may
    be async. It receives copies, so its changes to extra_info are lost after the call; ``extra_info`` is added to the row's.
    One that takes reward_model_tokenizer gets the tokenizer of the model ``judge_tokenizer``.

    Raises: ConfigError when the file or function is missing, the file fails on import, or the function cannot be called with
        these arguments.
    """
    function, file = find_function(path, name)
    options = _with_tokenizer(function, options, judge_tokenizer)
    positional, keywords = _passed(inspect.signature(function), path, name, options)
    return partial(
        _score,
        function=function,
        file=str(file),
        options=dict(options),
        more=dict(extra_info or {}),
        positional=positional,
        keywords=keywords,
    )


def load_batched_function(
    path: str,
    name: str,
    options: Mapping[str, Any],
    extra_info: Mapping[str, Any] | None = None,
    judge_tokenizer: str | None = None,
) -> BatchedRewardFn:
    """Build a reward from a function that is called once with lists, by the keywords BATCH_KEYWORDS and ``options`` (which
    take precedence), and returns a list of results as for ``load_function``. It may be async, and receives copies.

    Raises: ConfigError, as ``load_function``.
    """
    function, file = find_function(path, name)
    options = _with_tokenizer(function, options, judge_tokenizer)
    _check_batched(inspect.signature(function), path, name, options)
    more = dict(extra_info or {})
    return partial(_score_batch, function=function, file=str(file), options=dict(options), more=more)


def own_place(reward: Any) -> str:
    """file:line of the user's function in a reward that was built here; "" for any other reward."""
    if isinstance(reward, partial) and reward.func in (_score, _score_batch):
        return defined_at(reward.keywords["function"])
    return ""


def _check_batched(signature: inspect.Signature, path: str, name: str, options: Mapping[str, Any]) -> None:
    """Raises: ConfigError when a function cannot be called with lists, by the keywords BATCH_KEYWORDS and ``options``."""
    try:
        signature.bind(**{**dict.fromkeys(BATCH_KEYWORDS), **options})
    except TypeError as error:
        called = ", ".join([*BATCH_KEYWORDS, *(option for option in options if option not in BATCH_KEYWORDS)])
        what = f"{name}{signature} in {path} cannot be called with the keywords {called}: {error}"
        fix = "take these names, or **kwargs; a function of one response is called with batched: false"
        raise ConfigError(Problem(what, fix=fix)) from error


def _score_batch(
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    *,
    function: Callable[..., Any],
    file: str,
    options: Mapping[str, Any],
    more: Mapping[str, Any],
) -> Any:
    arguments = {
        "data_sources": [prompt.data_source for prompt in prompts],
        "solution_strs": list(responses),
        "ground_truths": [copy.deepcopy(prompt.ground_truth) for prompt in prompts],
        "extra_infos": [copy.deepcopy({**prompt.extra_info, **more}) for prompt in prompts],
        **options,
    }
    return _called(function, (), arguments, file)


def find_function(path: str, name: str) -> tuple[Callable[..., Any], Path]:
    """Return a function and its file. Raises: ConfigError."""
    check_function(path, name)
    if _imports_verl(path):
        above = (folder / "verl" for folder in source_file(path).absolute().parents)
        verl_modules.provide(next((folder for folder in above if (folder / "__init__.py").is_file()), None))
    function = getattr(import_path(path), name, None)
    if not callable(function):
        raise ConfigError(Problem(f"{name!r} in {path} is not a function"))
    return function, source_file(path)


def _imports_verl(path: str) -> bool:
    """Return True for a file that imports verl anywhere in it, which may be in a checkout of the user's or not here at all."""
    tree = parse_file(path, source_file(path, holds=REWARD_FUNCTION))
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    return any(module.partition(".")[0] == "verl" for module in named)


def _with_tokenizer(function: Callable[..., Any], options: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """The options, with the tokenizer of a judge's model where the function takes it. Raises: ConfigError without one."""
    if model is None or JUDGE_TOKENIZER not in inspect.signature(function).parameters or JUDGE_TOKENIZER in options:
        return dict(options)
    from transformers import AutoTokenizer  # takes seconds

    try:
        return {**options, JUDGE_TOKENIZER: AutoTokenizer.from_pretrained(model)}
    except (OSError, ValueError) as error:
        what = f"the tokenizer of the judge's model {model} cannot be loaded: {last_line(error)}"
        raise ConfigError(Problem(what, fix="name a folder that is here", field="judge_tokenizer")) from error


def _passed(
    signature: inspect.Signature, path: str, name: str, options: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of KEYWORDS a function gets by position and which by keyword. Raises: ConfigError when it can be called
    in neither way."""
    parameters = signature.parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = tuple(word for word in KEYWORDS if takes_any or word in parameters)
    more = {option: value for option, value in options.items() if option not in KEYWORDS}
    # A parameter with one of the four names shows that the function means keywords, and that another name is wrong.
    by_name = takes_any or any(word in parameters for word in KEYWORDS)
    ways: list[tuple[tuple[str, ...], tuple[str, ...]]]
    ways = [((), named)] if by_name else [(words, ()) for words in reversed(POSITIONAL.values())]
    if by_name and _takes_two(signature):
        ways.append((POSITIONAL[2], ()))
    if not by_name:
        _check_order(signature, path, name, more)
    failure: TypeError | None = None
    for positional, keywords in ways:
        try:
            signature.bind(*positional, **dict.fromkeys(keywords), **more)
        except TypeError as error:
            failure = failure or error
        else:
            return positional, keywords
    called = ", ".join([*KEYWORDS, *more])
    what = f"{name}{signature} in {path} cannot be called with the keywords {called}: {failure}"
    fix = "take some of these names, or **kwargs, or two or four parameters of other names; the term's options add to them"
    raise ConfigError(Problem(what, fix=fix))


def _check_order(signature: inspect.Signature, path: str, name: str, options: Mapping[str, Any]) -> None:
    """Raises: ConfigError for a function of two that wants a prompt first, and would score it as the response; and for one of
    four that wants a prompt or a response first, where verl's own have the data source."""
    needed = [word for word, each in signature.parameters.items() if each.default is each.empty and word not in options]
    if len(needed) == 4 and (needed[0] in PROMPTS or _TEXT.search(needed[0])):
        what = f"{name}{signature} in {path} would get the data source as {needed[0]}, and the response as {needed[1]}"
        raise ConfigError(Problem(what, fix=f"name its parameters {', '.join(KEYWORDS)}, as far as it needs them"))
    if len(needed) == 2 and needed[0] in PROMPTS:
        what = f"{name}{signature} in {path} would get the response as {needed[0]}, and the reference answer as {needed[1]}"
        fix = "name its parameters solution_str (the response) and ground_truth (the reference answer), as far as it needs them"
        raise ConfigError(Problem(what, fix=fix))


def _takes_two(signature: inspect.Signature) -> bool:
    """Return True for a response under another name, then ground_truth, and nothing else without a default: the form of verl's
    own scorers, such as math_verify."""
    needed = [name for name, each in signature.parameters.items() if each.default is each.empty]
    return len(needed) == 2 and needed[0] not in KEYWORDS and needed[1] == "ground_truth"


def _score(
    prompt: Prompt,
    response: str,
    *,
    function: Callable[..., Any],
    file: str,
    options: Mapping[str, Any],
    more: Mapping[str, Any],
    positional: Sequence[str],
    keywords: Sequence[str],
) -> Any:
    """Call the function. Raises: UserRewardError when it raises."""
    values = {
        "data_source": prompt.data_source,
        "solution_str": response,
        "ground_truth": copy.deepcopy(prompt.ground_truth),
        "extra_info": copy.deepcopy({**prompt.extra_info, **more}),
        **options,
    }
    named = {word: value for word, value in values.items() if word in keywords or word not in KEYWORDS}
    return _called(function, [values[word] for word in positional], named, file)


def _called(function: Callable[..., Any], positional: Sequence[Any], arguments: Mapping[str, Any], file: str) -> Any:
    """Call the function and await its result. Raises: UserRewardError."""
    try:
        result = function(*positional, **arguments)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except (Exception, SystemExit) as error:  # a user's program may fail in any way, and its exit() must not end ours
        place = place_of(error, file)
        place = place if ":" in place else defined_at(function)
        raise UserRewardError(f"{place}: {last_line(error)}") from error


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
