"""The class of a checkout of verl whose own loop plays the episodes, read from the trainer that builds it: nothing is imported.

    generation_manager = LLMGenerationManager(tokenizer=self.tokenizer, actor_rollout_wg=self.actor_rollout_wg, config=gen_config)
    output = generation_manager.run_llm_loop(gen_batch=gen_batch, initial_input_ids=first_input_ids)

Found by its use, whatever the names are: the trainer's ``fit`` passes verl's sampling workers to a class, and calls one method of
the object with a batch. ``envs.verl_loop`` evaluates the same expressions, in a process of its own, for an episode.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.checkout_files import file_of, imported_names, parsed
from posttrain.verl_sites import Names, Site, keys_in, names_at, reached, site_of

SAMPLER = "actor_rollout_wg"  # verl's attribute of the workers that sample
TOKENIZER = "tokenizer"
BATCH = "pop"  # the method that takes the batch to generate from out of the step's batch
# Of the sampling workers, by the class that plays: what an episode of its own can answer
ANSWERED = frozenset({"generate_sequences", "world_size"})
# Attributes of verl's trainer where its workers sample, and no servers do
SYNCHRONOUS: Mapping[str, Any] = {"async_rollout_mode": False, "async_rollout_manager": None}
_GIVEN = frozenset({"config", TOKENIZER, SAMPLER, *SYNCHRONOUS})  # attributes of the trainer
_CLUSTER = frozenset({"ray", "vllm", "sglang", "deepspeed", "megatron"})
PROGRAMS = ("config", TOKENIZER)  # names of the program that have their values
_REWARD = "reward_fn"


class NotPlayable(Exception):
    """An episode of its own cannot give the class what it needs; the message says what, with its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """An attribute of the trainer that its constructor, or the program behind it, gives a value."""

    value: ast.expr
    site: Site


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLoop:
    """A class that plays episodes, and how the trainer builds and calls it."""

    name: str
    file: Path  # of the class
    line: int
    method: str
    made: ast.Call  # builds the object
    call: ast.Call  # of the method
    batch: str  # the name of the batch that the method gets
    rows: str  # the name of the step's batch, out of which that one was taken
    site: Site
    methods: tuple[ast.FunctionDef, ...]  # of the trainer, which the expressions call
    attributes: Mapping[str, Attribute]  # of the trainer, which they read
    counter: str  # the attribute that counts the steps; "" where they do not read it
    by_row: frozenset[
        int
    ]  # arguments, by the identity of their nodes, that are made of the step's batch: a value for each row
    stops: tuple[str, ...]  # texts behind which the class cuts a response
    copies: tuple[str, ...]  # keys of the configuration: how often the trainer repeats a prompt before the loop
    guard: str  # the key without which the trainer plays no episodes; "" without one
    masking: str  # the key that leaves observations out of the loss; "" without one
    accounted: frozenset[str]  # calls of the trainer's loop that belong to the episodes

    @property
    def title(self) -> str:
        return f"{self.name}.{self.method} (line {self.line} of {self.file})"

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the places whose expressions read the configuration."""
        return self.site, *(each.site for each in self.attributes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReward:
    """The object that a program passes to the trainer as its reward function."""

    name: str
    file: Path  # of its class
    value: ast.expr
    site: Site


def find_loop(trainer: Path, name: str, fit: str, roots: Sequence[Path], program: Path | None = None) -> EpisodeLoop:
    """Find the class that plays the episodes of the loop ``fit`` of a trainer's class.

    Args: ``roots`` are the folders that its modules may stand below; ``program`` builds the trainer.
    Raises: NotPlayable.
    """
    source = parsed(trainer)
    owner = _class(source, name)
    method = _function(owner, fit)
    if source is None or owner is None or method is None:
        raise NotPlayable(f"{trainer} has no {name}.{fit}")
    made, player = _made(method)
    calls = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == player
    ]
    called = {ast.unparse(node.func) for node in calls}
    if len(called) != 1:
        found = ", ".join(sorted(called)) or "none"
        raise NotPlayable(f"one method of the object is to play, and {fit} calls {found} (line {made.lineno})")
    call = min(calls, key=lambda node: node.lineno)
    names = names_at(method, call)
    batch, rows = _batch(call, names)
    arguments = [*call.args, *(one.value for one in call.keywords)]
    given = {batch, rows, player}
    nodes = list(reached([made, call], names, given))
    parts = _Parts(owner, method, trainer, program, list(roots))
    nodes += parts.take(nodes, ast.unparse(call.func))
    _check_reached(nodes, names, given, call)
    by_row = {id(each) for each in arguments if any(_is_name(node, rows) for node in reached([each], names, given))}
    class_name = _last(made.func)
    module, known_as = imported_names(source).get(class_name, ("", class_name))
    file = file_of(module, trainer, roots) if module else trainer
    definition = _class(parsed(file), known_as) if file is not None else None
    if file is None or definition is None:
        raise NotPlayable(f"{class_name} (line {made.lineno} of {trainer}) is not in the checkout")
    _check_class(definition, file)
    own_masks = {each.name for each in _methods(owner) if "info_mask" in ast.unparse(each) and each.name != fit}
    return EpisodeLoop(
        name=known_as,
        file=file,
        line=definition.lineno,
        method=_last(call.func),
        made=made,
        call=call,
        batch=batch,
        rows=rows,
        site=site_of(trainer, nodes, names, root="self.config."),
        methods=tuple(parts.methods.values()),
        attributes=parts.attributes,
        counter=parts.counter,
        by_row=frozenset(by_row),
        stops=tuple(dict.fromkeys(_stops(definition))),
        copies=tuple(dict.fromkeys(_copies(method))),
        guard=_guard(method, call),
        masking=next((key for key in keys_in(ast.walk(method), "self.config.") if key.endswith(".state_masking")), ""),
        accounted=frozenset({_last(node.func) for node in nodes if isinstance(node, ast.Call)} | own_masks),
    )


def find_reward(program: Path, roots: Sequence[Path]) -> EpisodeReward | None:
    """Find the object that a program passes to its trainer as ``reward_fn``; None where its class is not in the checkout."""
    source = parsed(program)
    for function, call in _calls_with(source, _REWARD):
        names = names_at(function, call)
        value = next(one.value for one in call.keywords if one.arg == _REWARD)
        made = names.value(value.id) if isinstance(value, ast.Name) else value
        if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name) or made.func.id in names.given:
            continue
        assert source is not None
        module, known_as = imported_names(source).get(made.func.id, ("", made.func.id))
        file = file_of(module, program, roots) if module else program
        if file is None or _class(parsed(file), known_as) is None:
            continue
        nodes = list(reached([made], names, PROGRAMS))
        return EpisodeReward(name=known_as, file=file, value=made, site=site_of(program, nodes, names, root="config."))
    return None


class _Parts:
    """The parts of a trainer that expressions of its loop read, besides its configuration, its tokenizer and its sampler."""

    def __init__(
        self, owner: ast.ClassDef, method: ast.FunctionDef, file: Path, program: Path | None, roots: Sequence[Path]
    ):
        self._owner, self._method, self._file, self._program, self._roots = owner, method, file, program, roots
        self.methods: dict[str, ast.FunctionDef] = {}
        self.attributes: dict[str, Attribute] = {}
        self.counter = ""

    def take(self, nodes: Sequence[ast.AST], asked: str) -> list[ast.AST]:
        """Find the trainer's attributes among nodes. Returns: the nodes of the methods that they call. Raises: NotPlayable."""
        found: list[ast.AST] = []
        for node in nodes:
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "self" or node.attr in _GIVEN:
                continue
            name = node.attr
            if name in self.methods or name in self.attributes or name == self.counter:
                continue
            if (own := _function(self._owner, name)) is not None and not own.decorator_list:
                self.methods[name] = own
                within = list(ast.walk(own))
                found += [*within, *self.take(within, f"{self._owner.name}.{name}")]
            elif self._counts(name):
                self.counter = name
            elif (attribute := self._attribute(name)) is not None:
                self.attributes[name] = attribute
            else:
                raise NotPlayable(f"{asked} reads self.{name} (line {node.lineno}) of the trainer")
        return found

    def _counts(self, name: str) -> bool:
        """Return True for an attribute that the loop itself counts up, from 0, as it does its steps, and changes nowhere else."""
        changes = [
            ast.unparse(each)
            for each in ast.walk(self._method)
            if isinstance(each, ast.Assign | ast.AugAssign)
            if f"self.{name}"
            in [ast.unparse(one) for one in (each.targets if isinstance(each, ast.Assign) else [each.target])]
        ]
        return {*changes} == {f"self.{name} = 0", f"self.{name} += 1"} and changes.count(f"self.{name} += 1") == 2

    def _attribute(self, name: str) -> Attribute | None:
        """The value that the constructor takes over from the program that builds the trainer."""
        constructor = _function(self._owner, "__init__")
        assigned = [
            each.value
            for each in (ast.walk(constructor) if constructor is not None else ())
            if isinstance(each, ast.Assign) and [ast.unparse(one) for one in each.targets] == [f"self.{name}"]
        ]
        if len(assigned) != 1 or not isinstance(assigned[0], ast.Name) or self._program is None:
            return None
        for function, call in _calls_with(parsed(self._program), assigned[0].id):
            value = next(one.value for one in call.keywords if one.arg == assigned[0].id)
            names = names_at(function, call)
            nodes = list(reached([value], names, PROGRAMS))
            unknown = [each.id for each in nodes if isinstance(each, ast.Name) and each.id in names.looped]
            if not unknown:
                return Attribute(value=value, site=site_of(self._program, nodes, names, root="config."))
        return None


def _calls_with(source: ast.Module | None, keyword: str) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """The calls of a program that have a keyword argument, with their functions."""
    for function in ast.walk(source) if source is not None else ():
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and any(one.arg == keyword for one in node.keywords):
                    yield function, node


def _made(method: ast.FunctionDef) -> tuple[ast.Call, str]:
    """The call that gets the sampling workers, and the name of the object that it makes."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            values = [*node.value.args, *(one.value for one in node.value.keywords)]
            if any(isinstance(each, ast.Attribute) and each.attr == SAMPLER for each in values):
                return node.value, ast.unparse(node.targets[0])
    raise NotPlayable("the sampler is passed to a function, and not to a class that plays")


def _batch(call: ast.Call, names: Names) -> tuple[str, str]:
    """The argument that is the batch, which was taken out of the step's batch, and the name of that one."""
    for value in (*call.args, *(one.value for one in call.keywords)):
        taken = _taken_from(value.id, names) if isinstance(value, ast.Name) else set()
        if isinstance(value, ast.Name) and len(taken) == 1:
            return value.id, taken.pop()
    raise NotPlayable(f"{ast.unparse(call.func)} (line {call.lineno}) gets no batch that is taken out of the step's")


def _taken_from(name: str, names: Names) -> set[str]:
    """The batches out of which a name is taken, by every statement that gives it a value; empty where one does otherwise."""
    given = [
        node.value
        for statement in names.given.get(name, ())
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == [name]
    ]
    found = set()
    for value in given:
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=rows), attr=attr)) if attr == BATCH:
                found.add(rows)
            case _:
                return set()
    return found


def _check_reached(nodes: Sequence[ast.AST], names: Names, given: Collection[str], call: ast.Call) -> None:
    """Raises: NotPlayable for what belongs to the trainer's own run."""
    asked = ast.unparse(call.func)
    for node in nodes:
        if isinstance(node, ast.Attribute) and _last(node.value) == SAMPLER and node.attr not in ANSWERED:
            raise NotPlayable(f"{asked} gets what {SAMPLER}.{node.attr} makes (line {node.lineno})")
        loads = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in given
        if loads and isinstance(node, ast.Name) and (line := names.looped.get(node.id)):
            raise NotPlayable(f"{asked} gets {node.id}, which the trainer's loop makes (line {line})")


def _check_class(definition: ast.ClassDef, file: Path) -> None:
    """Raises: NotPlayable for a use of the sampling workers, or of a library, that an episode of its own does not have."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and _last(node.value) == SAMPLER and node.attr not in ANSWERED:
            raise NotPlayable(f"it calls {SAMPLER}.{node.attr} (line {node.lineno} of {file})")
        on_device = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
        if on_device and isinstance(node, ast.Call):
            raise NotPlayable(f"it needs tensors on a GPU (line {node.lineno} of {file})")
    source = parsed(file)
    used = {node.id: node.lineno for node in ast.walk(definition) if isinstance(node, ast.Name)}
    for name, module in _top_modules(source).items():
        if name in used and module in _CLUSTER:
            raise NotPlayable(f"it uses {module} (line {used[name]} of {file})")


def _top_modules(source: ast.Module | None) -> dict[str, str]:
    """The names that a file imports -> the package that each is from."""
    found: dict[str, str] = {}
    for node in ast.walk(source) if source is not None else ():
        if isinstance(node, ast.Import):
            found |= {(one.asname or one.name).split(".")[0]: one.name.split(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {one.asname or one.name: (node.module or "").split(".")[0] for one in node.names}
    return found


def _stops(definition: ast.ClassDef) -> Iterator[str]:
    """Texts behind which a class cuts: ``text.split(END)[0] + END``."""
    for node in ast.walk(definition):
        match node:
            case ast.BinOp(
                left=ast.Subscript(
                    value=ast.Call(func=ast.Attribute(attr="split"), args=[ast.Constant(value=str(end)), *_]),
                    slice=ast.Constant(value=0),
                ),
                op=ast.Add(),
                right=ast.Constant(value=str(again)),
            ) if end and end == again:
                yield end


def _copies(method: ast.FunctionDef) -> Iterator[str]:
    """Keys that say how often a prompt is repeated."""
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and _last(node.func) == "repeat":
            for one in node.keywords:
                if one.arg == "repeat_times":
                    yield from keys_in(ast.walk(one.value), "self.config.")


def _guard(method: ast.FunctionDef, call: ast.Call) -> str:
    """The key that the trainer asks before it plays: ``if not self.config.KEY: ... else: PLAYS``."""
    for node in ast.walk(method):
        if not isinstance(node, ast.If):
            continue
        denied = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        within = node.orelse if denied else node.body
        key = next(keys_in(ast.walk(test), "self.config."), "")
        if key and any(each is call for statement in within for each in ast.walk(statement)):
            return key
    return ""


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _class(source: ast.Module | None, name: str) -> ast.ClassDef | None:
    found = source.body if source is not None else []
    return next((node for node in found if isinstance(node, ast.ClassDef) and node.name == name), None)


def _methods(owner: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in owner.body if isinstance(node, ast.FunctionDef)]


def _function(owner: ast.ClassDef | None, name: str) -> ast.FunctionDef | None:
    return next((each for each in _methods(owner) if each.name == name), None) if owner is not None else None


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
