"""An advantage estimator inside the trainer of a fork of verl, read from its source: nothing is imported.

    if self.config.algorithm.adv_estimator == AdvantageEstimator.MINE:          # in fit: prepares columns of the batch
        batch.batch["step_rewards"] = core_mine.step_returns(batch=batch, gamma=self.config.algorithm.gamma)
    ...
    batch = compute_advantage(batch, adv_estimator=..., mode=self.config.algorithm.mine.mode)

``compute_advantage`` has a branch for it, which calls the fork's own function. ``algos.verl.trainer_estimator`` evaluates these
statements, in a process of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from posttrain.checkout_files import file_of, imported_names, parsed
from posttrain.verl_sites import Site, keys_in, names_at, reached, site_of

FUNCTION = "compute_advantage"
TRAINER = "verl/trainer/ppo/ray_trainer.py"  # below a checkout
CONFIG_ROOT = "self.config."
# Columns of the batch that a run gives such an estimator, where every turn of an episode is a row
TENSORS = frozenset(
    (
        "prompts",
        "responses",
        "input_ids",
        "attention_mask",
        "response_mask",
        "token_level_scores",
        "token_level_rewards",
    )
)
VALIDITY = "is_action_valid"
OBJECTS = frozenset(
    ("uid", "traj_uid", "anchor_obs", "rewards", "episode_rewards", "episode_lengths", "active_masks", VALIDITY)
)
_ENUMERATION = "AdvantageEstimator"
_SWITCH = "adv_estimator"
_PENALTY = "apply_invalid_action_penalty"
_STEP_REWARDS = "step_rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEstimator:
    """A branch of a trainer's ``compute_advantage``, and what its loop does for it."""

    definition: ast.FunctionDef  # compute_advantage
    line: int  # of the branch
    calls: frozenset[str]  # functions that the branch, its preparation and its settings call, and that of the others
    call: ast.Call  # of compute_advantage, in the loop
    batch: str  # the name of the step's batch there
    prepared: tuple[ast.stmt, ...]  # statements of the loop that add columns for this estimator
    site: Site
    reads: frozenset[str]  # columns of the batch, without those that it adds
    others: Mapping[str, int]  # keys by which the loop does something else for this estimator, with the lines
    penalizes_steps: bool  # invalid actions are taken from step_rewards, too

    @property
    def unknown(self) -> list[str]:
        """Columns of the batch that no run here computes."""
        return sorted(self.reads - TENSORS - OBJECTS)

    @property
    def reads_tokens(self) -> bool:
        return bool(self.reads & {"responses", "input_ids"})


def find_in_trainer(file: Path, name: str) -> TrainerEstimator | None:
    """The estimator of this name in the file of a trainer; None where its ``compute_advantage`` has no branch for it."""
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        return None
    return _found(file, name, changed)


def checkout_of(file: Path) -> Path:
    """The folder from which the modules of a checkout are imported, by its trainer's file."""
    holds_verl = (each for each in file.absolute().parents if (each / TRAINER).is_file())
    return next(holds_verl, file.absolute().parent)


def keys_handed(file: Path) -> frozenset[str]:
    """The keys of the configuration that a trainer's loop hands to its ``compute_advantage``, for whatever estimator."""
    source = parsed(file)
    calls = [node for node in ast.walk(source) if _is_call_of(node, FUNCTION)] if source is not None else []
    return frozenset(keys_in((each for call in calls for each in ast.walk(call)), CONFIG_ROOT))


@lru_cache(maxsize=16)
def _found(file: Path, name: str, changed: int) -> TrainerEstimator | None:
    """Args: ``changed`` is the time of the file's last change."""
    source = parsed(file)
    member = _member_of(source, name) if source is not None else ""
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)} if source else {}
    if source is None or not member or FUNCTION not in functions:
        return None
    test = f"{_SWITCH} == {member}"
    branch = next((node for node in _ifs(functions[FUNCTION]) if ast.unparse(node.test) == test), None)
    for loop in (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == "fit"):
        call = next((node for node in ast.walk(loop) if _is_call_of(node, FUNCTION)), None)
        if branch is None or not isinstance(call, ast.Call) or (batch := _batch_of(loop)) is None:
            continue
        own = f"{CONFIG_ROOT}algorithm.{test}"
        chosen = [node for node in _ifs(loop) if ast.unparse(node.test) == own and node.lineno < call.lineno]
        prepared = [statement for node in chosen for statement in node.body]
        names = names_at(loop, call)
        values = [one.value for one in call.keywords]
        nodes = [each for value in [*values, *prepared] for each in reached([value], names, ("self", batch))]
        bodies = [*branch.body, *prepared]
        bodies += [each for node in _calls(bodies) for each in _body_of(node, source, file)]
        return TrainerEstimator(
            definition=functions[FUNCTION],
            line=branch.lineno,
            calls=frozenset(
                _last(node.func) for node in [*_calls([*branch.body, *prepared]), *_calls(nodes), *_apart(loop, own)]
            )
            | _called_by(loop, call),
            call=call,
            batch=batch,
            prepared=tuple(prepared),
            site=site_of(file, nodes, names, root=CONFIG_ROOT),
            reads=frozenset(_columns(bodies, ast.Load)) - set(_columns(bodies, ast.Store)),
            others=dict(_others(loop, own)),
            penalizes_steps=_PENALTY in functions and _names_steps(functions[_PENALTY]),
        )
    return None


def _member_of(source: ast.Module, name: str) -> str:
    """``AdvantageEstimator.MINE`` for the value "mine"; "" without such a member."""
    for node in source.body:
        for line in node.body if isinstance(node, ast.ClassDef) and node.name == _ENUMERATION else ():
            match line:
                case ast.Assign(targets=[ast.Name(id=member)], value=ast.Constant(value=value)) if value == name:
                    return f"{_ENUMERATION}.{member}"
    return ""


def _ifs(function: ast.FunctionDef) -> list[ast.If]:
    return [node for node in ast.walk(function) if isinstance(node, ast.If)]


def _is_call_of(node: ast.AST, name: str) -> bool:
    """Return True for ``name(...)``, and for ``partial(name, ...)``."""
    match node:
        case ast.Call(func=ast.Name(id=called)) if called == name:
            return True
        case ast.Call(func=ast.Name(id="partial"), args=[ast.Name(id=first), *_]):
            return first == name
    return False


def _batch_of(loop: ast.FunctionDef) -> str | None:
    """The name of the batch that the loop adds columns to: ``NAME.batch[...] = ...``."""
    for node in ast.walk(loop):
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="batch" | "non_tensor_batch"))]
            ):
                return name
    return None


def _calls(statements: Sequence[ast.AST]) -> list[ast.Call]:
    return [node for each in statements for node in ast.walk(each) if isinstance(node, ast.Call)]


def _body_of(call: ast.Call, source: ast.Module, file: Path) -> list[ast.stmt]:
    """The statements of a function of the checkout that gets the whole batch; none for others."""
    handed = [*call.args, *(one.value for one in call.keywords)]
    if not any(isinstance(each, ast.Name) and each.id in ("batch", "data") for each in handed):
        return []
    name, owner = _last(call.func), call.func.value if isinstance(call.func, ast.Attribute) else None
    module, known_as = imported_names(source).get(ast.unparse(owner) if owner is not None else name, ("", ""))
    path = f"{module}.{known_as}" if owner is not None and module else module
    found = file_of(path, file, [checkout_of(file)]) if path else file
    tree = parsed(found) if found is not None else None
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node.body
    return []


def _columns(statements: Sequence[ast.stmt], context: type[ast.expr_context]) -> Iterator[str]:
    """Columns of ``data.batch["x"]`` and ``data.non_tensor_batch["x"]`` that statements read, or assign."""
    for node in (each for statement in statements for each in ast.walk(statement)):
        match node:
            case ast.Subscript(
                value=ast.Attribute(attr="batch" | "non_tensor_batch"), slice=ast.Constant(value=str(name)), ctx=ctx
            ) if isinstance(ctx, context):
                yield name


def _others(loop: ast.FunctionDef, own: str) -> Iterator[tuple[str, int]]:
    """Keys that branches of the loop for this estimator ask as well: ``if adv_estimator == MINE and self.config.KEY``."""
    for node in _ifs(loop):
        if isinstance(node.test, ast.BoolOp) and own in ast.unparse(node.test):
            keys = keys_in(ast.walk(node.test), CONFIG_ROOT)
            yield from ((key, node.lineno) for key in keys if key != f"algorithm.{_SWITCH}")


def _apart(loop: ast.FunctionDef, own: str) -> list[ast.Call]:
    """The calls of these branches."""
    branches = (node for node in _ifs(loop) if isinstance(node.test, ast.BoolOp) and own in ast.unparse(node.test))
    return [call for node in branches for call in _calls(node.body)]


def _called_by(loop: ast.FunctionDef, call: ast.Call) -> set[str]:
    """The name that the loop gives ``partial(compute_advantage, ...)``."""
    assigned = (node for node in ast.walk(loop) if isinstance(node, ast.Assign) and node.value is call)
    return {each.id for node in assigned for each in node.targets if isinstance(each, ast.Name)}


def _names_steps(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == _STEP_REWARDS for node in ast.walk(function))


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
