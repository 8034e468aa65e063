"""Advantage estimators and policy losses written for verl or SkyRL, read from their source: nothing is imported.

verl calls both by keywords: an estimator with ``token_level_rewards``, a loss with ``old_log_prob`` and ``log_prob``. SkyRL
calls a loss with the policy's log-probs, the old ones and the advantages by position, ``config`` and ``loss_mask`` by keyword.
Such a function is described by our names of its inputs; ``algos.verl.functions`` loads it and translates its calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.settings import REQUIRED, Setting, default_of
from posttrain.verl_advantages import TrainerEstimator, find_in_trainer

# Parameter of theirs -> the input of ours that it is built from.
ESTIMATOR_INPUTS: Mapping[str, str] = {
    "token_level_rewards": "token_rewards",
    "token_level_scores": "token_scores",
    "response_mask": "response_mask",
    "eos_mask": "response_mask",
    "loss_mask": "response_mask",
    "index": "group_index",
    "uid": "group_index",
    "values": "values",
    "responses": "response_tokens",
    "reward_baselines": "greedy_rewards",
    "old_log_probs": "old_logprobs",
    "sum_pi_squared": "sum_pi_squared",
}
LOSS_INPUTS: Mapping[str, str] = {
    "old_log_prob": "old_logprobs",
    "log_prob": "policy_logprobs",
    "advantages": "advantages",
    "response_mask": "mask",
    "eos_mask": "mask",
    "loss_mask": "mask",
    "rollout_log_probs": "rollout_logprobs",
}
# SkyRL's: the first three by position, and by keyword
SKYRL_PLACES = ("policy_logprobs", "old_logprobs", "advantages")
SKYRL_INPUTS: Mapping[str, str] = {"loss_mask": "mask", "rollout_logprobs": "rollout_logprobs"}
# Parameters that the caller fills in without an input or a setting: our own objective aggregates and corrects.
WEIGHTS = ("rollout_is_weights", "rollout_is_weight")
FILLED_IN = ("loss_agg_mode", *WEIGHTS, "num_repeat", "norm_adv_by_std_in_grpo")
COLUMN = "column:"  # before the name of a column of the data, which an estimator is given as an array [B]
CONFIG = "config"  # their section algorithm, or actor
# Inputs of an estimator inside a fork's trainer, which sees every turn of an episode as a row
TURN_INPUTS = (
    *("token_rewards", "response_mask", "group_index", "trajectory_index", "step_index", "step_rewards"),
    *("turn_penalties", "state_texts"),
)
TOKENS = "response_tokens"
_DEFAULTS: Mapping[str, float] = {"gamma": 1.0, "lam": 1.0}
_DECORATORS = ("register_adv_est", "register_policy_loss", "register_advantage_estimator")
_TENSORS = ("Tensor", "FloatTensor", "LongTensor", "BoolTensor", "ndarray", "TensorDict", "DataProto")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlFunction:
    """A function written for verl or SkyRL."""

    definition: ast.FunctionDef
    is_loss: bool
    is_for_skyrl: bool
    """A loss that SkyRL calls: its number may be a sum, and its config is the section ``trainer.algorithm``."""
    inputs: Mapping[str, str]
    """Parameters that are tensors -> inputs of ours; of an unknown one, its own name."""
    settings: Mapping[str, Setting]
    """All further parameters."""
    reads: frozenset[str]
    """Names that its file reads of objects: what it may read from its config."""
    calls: frozenset[str]
    """Names of functions that it calls."""
    optional: frozenset[str] = frozenset()
    """Inputs that it takes as None in a run without the role that computes them: values, where they have a default or SkyRL
    calls the estimator, which hands over those of a critic that it may not have."""
    in_trainer: TrainerEstimator | None = None
    """An estimator that is a branch of a trainer's own function; its config is the whole configuration, as far as it reads it."""

    @property
    def compares_responses(self) -> bool:
        return "group_index" in self.inputs.values()

    def may_read(self, key: str) -> bool:
        """Return True for a key of its config, or a setting, whose name its file holds."""
        return key in self.settings or (CONFIG in self.settings and key.rpartition(".")[2] in self.reads)

    @property
    def unknown(self) -> list[str]:
        """Inputs that no run here computes."""
        if self.in_trainer is not None:
            return self.in_trainer.unknown
        known = set(LOSS_INPUTS.values() if self.is_loss else ESTIMATOR_INPUTS.values())
        return [name for name, source in self.inputs.items() if source not in known and not source.startswith(COLUMN)]

    @property
    def weighs_at(self) -> int:
        """The line of a loss that uses the weights of rollout correction otherwise than as a factor, 0 without one: it gets none,
        and its result is multiplied by them here."""
        above = {child: node for node in ast.walk(self.definition) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(self.definition):
            if isinstance(node, ast.Name) and node.id in WEIGHTS and not _is_factor(node, above):
                return node.lineno
        return 0

    @property
    def columns(self) -> list[str]:
        """Columns of the data that its trainer hands to it."""
        return [source.removeprefix(COLUMN) for source in self.inputs.values() if source.startswith(COLUMN)]

    @property
    def our_inputs(self) -> tuple[str, ...]:
        """Inputs of ours, each once. Estimators are shown the valid rows alone."""
        more = () if self.is_loss else ("valid", "response_mask")
        return tuple(dict.fromkeys((*self.inputs.values(), *more, *(("mask",) if self.is_loss else ()))))


def _is_factor(node: ast.expr, above: Mapping[ast.AST, ast.AST]) -> bool:
    """Return True for a name that is compared with None, or multiplied with: ``loss * weights.detach()``."""
    outer = above[node]
    while isinstance(outer, ast.Attribute) and outer.attr in ("detach", "to", "float", "type_as"):
        outer = above[above[outer]]
    if isinstance(outer, ast.Compare):
        return all(isinstance(each, ast.Is | ast.IsNot) for each in outer.ops)
    return isinstance(outer, ast.BinOp | ast.AugAssign) and isinstance(outer.op, ast.Mult)


@lru_cache(maxsize=64)  # a request asks for the same one a dozen times
def find(tree: ast.Module, name: str) -> VerlFunction | None:
    """The function for verl or SkyRL that a file has under ``name``: registered so (``@register_policy_loss("mine")``),
    called so, or the only one whose name begins with ``compute_<name>_``, as forks of verl call theirs. None without one."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_for_verl(node)]
    by_call = _registered_by_call(tree, name)
    registered = [node for node in functions if node.name in by_call or name in _registered_names(node, tree)]
    called = [node for node in functions if node.name == name]
    like = [node for node in functions if node.name.startswith(f"compute_{name}_")]
    for found in (registered, called, like):
        if len(found) == 1:
            return _described(found[0], tree)
    return None


def of_trainer(file: Path, name: str) -> VerlFunction | None:
    """The estimator of this name that is a branch of a trainer's own ``compute_advantage``; None without one."""
    found = find_in_trainer(file, name)
    if found is None:
        return None
    inputs = (*TURN_INPUTS, *((TOKENS,) if found.reads_tokens else ()))
    return VerlFunction(
        definition=found.definition,
        is_loss=False,
        is_for_skyrl=False,
        inputs={each: each for each in inputs},
        settings={
            CONFIG: Setting(CONFIG, dict[str, Any], {}, "the values that the trainer reads from its configuration")
        },
        reads=frozenset(),
        calls=found.calls,
        in_trainer=found,
    )


def with_columns(found: VerlFunction, file: Path) -> VerlFunction:
    """The function with the columns of the data that the trainer beside its file hands to parameters which no run here computes:
    ``compute_mine(..., domains=data.non_tensor_batch["domain"])`` in ``ray_trainer.py``. Nothing is run."""
    lacking = {*found.unknown, *(name for name, setting in found.settings.items() if setting.required)}
    trainer = file.with_name("ray_trainer.py")
    if found.is_loss or not lacking or not trainer.is_file():
        return found
    try:
        given = _columns_given(trainer, trainer.stat().st_mtime_ns, found.definition.name)
    except (OSError, SyntaxError, ValueError):
        return found
    columns = {name: f"{COLUMN}{column}" for name, column in given.items() if name in lacking}
    settings = {name: setting for name, setting in found.settings.items() if name not in columns}
    return replace(found, inputs={**found.inputs, **columns}, settings=settings)


@lru_cache(maxsize=16)
def _columns_given(trainer: Path, changed: int, called: str) -> dict[str, str]:
    """Parameters of a function that a trainer calls by its name -> the columns of ``non_tensor_batch`` that it hands over.

    Args: ``changed`` is the time of the file's last change.
    """
    given: dict[str, str] = {}
    for block in (getattr(node, "body", None) for node in ast.walk(ast.parse(trainer.read_bytes()))):
        assigned: dict[str, str] = {}
        for line in block if isinstance(block, list) else ():
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if column := _column_of(value, assigned):
                    assigned[name] = column
                case ast.Assign(value=ast.Call() as call) | ast.Expr(value=ast.Call() as call):
                    if ast.unparse(call.func).rpartition(".")[2] == called:
                        handed = {each.arg: _column_of(each.value, assigned) for each in call.keywords if each.arg}
                        given |= {name: column for name, column in handed.items() if column}
    return given


def _column_of(value: ast.expr, assigned: Mapping[str, str]) -> str:
    """The column in ``data.non_tensor_batch["x"]``, or in a variable that holds it; "" for something else."""
    match value:
        case ast.Name(id=name):
            return assigned.get(name, "")
        case ast.Subscript(value=ast.Attribute(attr="non_tensor_batch"), slice=ast.Constant(value=str(column))):
            return column
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="non_tensor_batch"), attr="get"),
            args=[ast.Constant(value=str(column)), *_],
        ):
            return column
    return ""


def _is_for_verl(node: ast.FunctionDef) -> bool:
    names = {each.arg for each in _parameters(node)}
    return "token_level_rewards" in names or {"old_log_prob", "log_prob"} <= names or _is_for_skyrl(node)


def _is_for_skyrl(node: ast.FunctionDef) -> bool:
    """Return True for a loss that SkyRL calls: three tensors by position, then ``config`` and ``loss_mask`` by keyword."""
    names = [each.arg for each in _parameters(node)]
    by_keyword = {CONFIG, "loss_mask"}
    return by_keyword <= set(names) and not by_keyword & set(names[:3]) and "log_prob" not in names


def _registered_names(node: ast.FunctionDef, tree: ast.Module) -> Iterator[str]:
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[word, *_]) if (
                called in _DECORATORS
            ):
                match word:
                    case ast.Constant(value=str(name)):
                        yield name
                    case ast.Attribute(value=ast.Name(id=enum), attr=member):
                        yield _member(tree, enum, member)


def _registered_by_call(tree: ast.Module, name: str) -> set[str]:
    """Functions that a file registers by a call: SkyRL's ``AdvantageEstimatorRegistry.register("name", function)``."""
    found = set()
    for line in ast.walk(tree):
        match line:
            case ast.Call(
                func=ast.Attribute(attr="register"), args=[ast.Constant(value=str(given)), ast.Name(id=called)]
            ) if given == name:
                found.add(called)
    return found


def _member(tree: ast.Module, enum: str, member: str) -> str:
    """The value of a member of an enumeration; of one from elsewhere, its name in small letters, as verl's own are."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == enum:
            for line in node.body:
                match line:
                    case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))) if (
                        name == member
                    ):
                        return value
    return member.lower()


def _parameters(node: ast.FunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _described(node: ast.FunctionDef, tree: ast.Module) -> VerlFunction:
    plain = [*node.args.posonlyargs, *node.args.args]
    padding: list[ast.expr | None] = [None] * (len(plain) - len(node.args.defaults))
    defaults = [*padding, *node.args.defaults, *node.args.kw_defaults]
    is_for_skyrl = _is_for_skyrl(node)
    is_loss = is_for_skyrl or "log_prob" in {each.arg for each in _parameters(node)}
    known = LOSS_INPUTS if is_loss else ESTIMATOR_INPUTS
    if is_for_skyrl:
        known = {**dict(zip((each.arg for each in plain), SKYRL_PLACES, strict=False)), **SKYRL_INPUTS}
    inputs: dict[str, str] = {}
    settings: dict[str, Setting] = {}
    for parameter, default in zip(_parameters(node), defaults, strict=True):
        name = parameter.arg
        if name in known and not (default is not None and known[name] in ("greedy_rewards", "sum_pi_squared")):
            inputs[name] = known[name]
        elif name == CONFIG or name in FILLED_IN:
            continue
        elif default is None and _is_tensor(parameter) and name not in _DEFAULTS:
            inputs[name] = name
        else:
            settings[name] = Setting(name, Any, _default(name, default), "")
    if any(each.arg == CONFIG for each in _parameters(node)):
        meaning = "the values that the function reads from its config"
        settings[CONFIG] = Setting(CONFIG, dict[str, Any], {}, meaning)
    reads = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    reads |= {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return VerlFunction(
        definition=node,
        is_loss=is_loss,
        is_for_skyrl=is_for_skyrl,
        inputs=inputs,
        settings=settings,
        reads=frozenset(reads),
        calls=frozenset(ast.unparse(each).rpartition(".")[2] for each in called),
        optional=frozenset({"values"} if "values" in inputs and _may_lack_values(node, tree) else ()),
    )


def _may_lack_values(node: ast.FunctionDef, tree: ast.Module) -> bool:
    """Return True for an estimator with a default for its values, or one in a file for SkyRL."""
    plain, given = [*node.args.posonlyargs, *node.args.args], node.args.kw_defaults
    with_default = {each.arg for each in plain[len(plain) - len(node.args.defaults) :]}
    with_default |= {each.arg for each, default in zip(node.args.kwonlyargs, given, strict=True) if default}
    sources = [line.module or "" for line in ast.walk(tree) if isinstance(line, ast.ImportFrom)]
    return "values" in with_default or any(source.startswith("skyrl") for source in sources)


def _default(name: str, node: ast.expr | None) -> Any:
    """A default that is no literal counts as null: the function knows it."""
    if node is None:
        return _DEFAULTS.get(name, REQUIRED)
    try:
        return default_of(node)
    except ValueError:
        return None


def _is_tensor(parameter: ast.arg) -> bool:
    return parameter.annotation is not None and any(word in ast.unparse(parameter.annotation) for word in _TENSORS)
