"""A fork's rewards that are written into its main program, ``verl/trainer/main_ppo.py``, as verl's own were up to 0.2, and the
functions by data source behind them. Files are parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkout_files import parsed
from posttrain.dialects.scripts.asks import Ask
from posttrain.verl_episodes import EpisodeReward, find_reward
from posttrain.verl_scoring import own_definitions, own_scores, root_of
from posttrain.verl_sites import read_in

_TRAINING, _VALIDATION = "reward_fn", "val_reward_fn"
_SHOWN = 3
# Of a manager's arguments: how many responses it prints
_PRINTS = "num_examine"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRewards:
    """The reward object of a fork's program, where verl has none like it."""

    reward: EpisodeReward
    program: Path
    own: tuple[str, ...]  # definitions behind it that verl does not have
    validates: str = ""  # how the one for validation is made, where it is made otherwise

    @property
    def title(self) -> str:
        more = f" and {len(self.own) - _SHOWN} more" if len(self.own) > _SHOWN else ""
        return f"{self.reward.name} of {self.program} (the fork's own: {', '.join(self.own[:_SHOWN])}{more})"


def program_rewards(program: Path, roots: Sequence[Path] = ()) -> ProgramRewards | None:
    """Find the reward object that a program makes of a class of the checkout; None where the class, the functions that it calls
    and the scorers that these import are all verl's."""
    root = root_of(program)
    found = find_reward(program, [root, *roots])
    source = parsed(found.file) if found is not None else None
    if found is None or source is None:
        return None
    own = [*own_definitions(found.file, _called_at_top(source, found.name)), *own_scores(found.file, root)]
    if not own:
        return None
    return ProgramRewards(reward=found, program=program, own=tuple(own), validates=_validation(program, found))


def unknown_rewards(program: Path) -> Ask | None:
    """The confirmation that a run needs where a program makes a reward object of a class of its own and does not pass it to
    its trainer in a way that is understood here, so that it is not called; None where it is verl's."""
    source = parsed(program)
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)} if source is not None else {}
    made = [
        node.value.func.id
        for node in (ast.walk(source) if source is not None else ())
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        if [ast.unparse(each) for each in node.targets] == [_TRAINING]
    ]
    name = next((each for each in made if each in classes), None)
    if name is None or source is None or not (own := own_definitions(program, _called_at_top(source, name))):
        return None
    what = f"scores by its own {name} (line {classes[name].lineno} of {program}; the fork's own: {', '.join(own)}), "
    what += "and does not pass it to its trainer as reward_fn=...; a run does not call it"
    meant = (
        "name a function that scores so with custom_reward_function.path, or confirm that the scorers of the rows' data_source "
        "are meant"
    )
    return Ask(field=name, title="the checkout", parts=(what,), meant=meant)


def _called_at_top(source: ast.Module, name: str) -> set[str]:
    """A definition's name, and the names at the top of its file that it reads, itself or through them."""
    defined = {
        node.name: node
        for node in source.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    defined_by_value = {
        target.id: node
        for node in source.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    there: dict[str, ast.stmt] = {**defined_by_value, **defined}
    found: set[str] = set()
    left = [name]
    while left:
        each = left.pop()
        if each in there and each not in found:
            found.add(each)
            left += read_in([there[each]])
    return found


def _validation(program: Path, found: EpisodeReward) -> str:
    """The expression of the reward object for validation where it differs from the one for training; "" where it does not."""
    source = parsed(program)
    made = {
        target.id: node.value
        for node in (ast.walk(source) if source is not None else ())
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    other = made.get(_VALIDATION)
    if other is None or not isinstance(other, ast.Call) or _said(other) == _said(found.value):
        return ""
    return f"{ast.unparse(other)} (line {other.lineno})"


def _said(call: ast.expr) -> str:
    """A call as a text, without what it prints."""
    if not isinstance(call, ast.Call):
        return ast.unparse(call)
    kept = [one for one in call.keywords if one.arg != _PRINTS]
    return ast.unparse(ast.Call(func=call.func, args=call.args, keywords=kept))
