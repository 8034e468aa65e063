"""The class of a checkout of verl whose own loop plays the episodes, read from the trainer that builds it: nothing is imported.

    generation_manager = LLMGenerationManager(tokenizer=self.tokenizer, actor_rollout_wg=self.actor_rollout_wg, config=gen_config)
    output = generation_manager.run_llm_loop(gen_batch=gen_batch, initial_input_ids=first_input_ids)

Found by its use, whatever the names are: the trainer's ``fit`` passes verl's sampling workers to a class, and calls one method of
the object with a batch. ``envs.verl_loop`` evaluates the same expressions, in a process of its own, for an episode.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkout_files import file_of, imported_names, parsed

SAMPLER = "actor_rollout_wg"  # verl's attribute of the workers that sample
TOKENIZER = "tokenizer"
BATCH = "pop"  # the method that takes the batch to generate from out of the step's batch
# Of the sampling workers, by the class that plays: what an episode of its own can answer
ANSWERED = frozenset({"generate_sequences", "world_size"})
_GIVEN = frozenset({"config", TOKENIZER, SAMPLER})  # attributes of the trainer
_CLUSTER = frozenset({"ray", "vllm", "sglang", "deepspeed", "megatron"})
_REWARD = "reward_fn"


class NotPlayable(Exception):
    """An episode of its own cannot give the class what it needs; the message says what, with its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Expressions of one function, to be evaluated with the names that it assigns."""

    file: Path
    assigned: Mapping[str, ast.expr]
    keys: frozenset[str]  # of the configuration that they read; "" for all of it
    optional: frozenset[str] = frozenset()  # of these, read with a default


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
    site: Site
    stops: tuple[str, ...]  # texts behind which the class cuts a response
    copies: tuple[str, ...]  # keys of the configuration: how often the trainer repeats a prompt before the loop
    guard: str  # the key without which the trainer plays no episodes; "" without one
    masking: str  # the key that leaves observations out of the loss; "" without one
    accounted: frozenset[str]  # calls of the trainer's loop that belong to the episodes

    @property
    def title(self) -> str:
        return f"{self.name}.{self.method} (line {self.line} of {self.file})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReward:
    """The object that a program passes to the trainer as its reward function."""

    name: str
    value: ast.expr
    site: Site


def find_loop(trainer: Path, name: str, fit: str, roots: Sequence[Path]) -> EpisodeLoop:
    """Find the class that plays the episodes of the loop ``fit`` of a trainer's class.

    Args: ``roots`` are the folders that its modules may stand below.
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
    assigned = _assigned(method, before=call.lineno)
    batch = _batch(call, assigned)
    reached = list(_reached([made, call], assigned, batch))
    site = _site(trainer, reached, assigned, roots="self.config.")
    _check_reached(reached, method, call)
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
        site=site,
        stops=tuple(dict.fromkeys(_stops(definition))),
        copies=tuple(dict.fromkeys(_copies(method))),
        guard=_guard(method, call),
        masking=next((key for key in _keys(ast.walk(method), "self.config.") if key.endswith(".state_masking")), ""),
        accounted=frozenset({_last(node.func) for node in reached if isinstance(node, ast.Call)} | own_masks),
    )


def find_reward(program: Path, roots: Sequence[Path]) -> EpisodeReward | None:
    """Find the object that a program passes to its trainer as ``reward_fn``; None where its class is not in the checkout."""
    source = parsed(program)
    for function in ast.walk(source) if source is not None else ():
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            given = {one.arg: one.value for one in node.keywords} if isinstance(node, ast.Call) else {}
            if _REWARD not in given or not isinstance(node, ast.Call):
                continue
            assigned = _assigned(function, before=node.lineno)
            value = given[_REWARD]
            made = assigned.get(value.id) if isinstance(value, ast.Name) else value
            if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name) or made.func.id in assigned:
                continue
            assert source is not None
            module, known_as = imported_names(source).get(made.func.id, ("", made.func.id))
            file = file_of(module, program, roots) if module else program
            if file is None or _class(parsed(file), known_as) is None:
                continue
            reached = list(_reached([made], assigned, TOKENIZER))
            return EpisodeReward(name=known_as, value=made, site=_site(program, reached, assigned, roots="config."))
    return None


def _made(method: ast.FunctionDef) -> tuple[ast.Call, str]:
    """The call that gets the sampling workers, and the name of the object that it makes."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            values = [*node.value.args, *(one.value for one in node.value.keywords)]
            if any(isinstance(each, ast.Attribute) and each.attr == SAMPLER for each in values):
                return node.value, ast.unparse(node.targets[0])
    raise NotPlayable("the sampler is passed to a function, and not to a class that plays")


def _batch(call: ast.Call, assigned: Mapping[str, ast.expr]) -> str:
    """The argument that is the batch: it was taken out of the step's batch."""
    for value in (*call.args, *(one.value for one in call.keywords)):
        given = assigned.get(value.id) if isinstance(value, ast.Name) else None
        if isinstance(value, ast.Name) and isinstance(given, ast.Call) and _last(given.func) == BATCH:
            return value.id
    raise NotPlayable(f"{ast.unparse(call.func)} (line {call.lineno}) gets no batch that is taken out of the step's")


def _assigned(method: ast.FunctionDef, *, before: int) -> dict[str, ast.expr]:
    """The names that a function assigns before a line, each with its last value."""
    found: dict[str, tuple[int, ast.expr]] = {}
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or node.lineno >= before:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and (target.id not in found or found[target.id][0] < node.lineno):
            found[target.id] = (node.lineno, node.value)
    return {name: value for name, (_, value) in found.items()}


def _reached(values: Sequence[ast.expr], assigned: Mapping[str, ast.expr], given: str) -> Iterator[ast.AST]:
    """The nodes of expressions, and of those that the names in them were assigned; ``given``: a name that has its value."""
    seen, left = {given}, list(values)
    while left:
        for node in ast.walk(left.pop()):
            yield node
            if isinstance(node, ast.Name) and node.id in assigned and node.id not in seen:
                seen.add(node.id)
                left.append(assigned[node.id])


def _check_reached(reached: Sequence[ast.AST], method: ast.FunctionDef, call: ast.Call) -> None:
    """Raises: NotPlayable for what belongs to the trainer's own run."""
    looped = {
        name.id: node.lineno
        for node in ast.walk(method)
        if isinstance(node, ast.For | ast.With | ast.AugAssign)
        for target in (
            [node.target] if isinstance(node, ast.For | ast.AugAssign) else [one.optional_vars for one in node.items]
        )
        if target is not None
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    changed = {
        ast.unparse(node.func.value): node.lineno
        for node in ast.walk(method)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("append", "extend", "update")
    }
    for node in reached:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr not in _GIVEN:
            raise NotPlayable(f"{ast.unparse(call.func)} reads self.{node.attr} (line {node.lineno}) of the trainer")
        if isinstance(node, ast.Name) and (line := looped.get(node.id) or changed.get(node.id)):
            raise NotPlayable(f"{ast.unparse(call.func)} gets {node.id}, which the trainer's loop makes (line {line})")


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
                    yield from _keys(ast.walk(one.value), "self.config.")


def _guard(method: ast.FunctionDef, call: ast.Call) -> str:
    """The key that the trainer asks before it plays: ``if not self.config.KEY: ... else: PLAYS``."""
    for node in ast.walk(method):
        if not isinstance(node, ast.If):
            continue
        denied = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        within = node.orelse if denied else node.body
        key = next(_keys(ast.walk(test), "self.config."), "")
        if key and any(each is call for statement in within for each in ast.walk(statement)):
            return key
    return ""


def _site(file: Path, reached: Sequence[ast.AST], assigned: Mapping[str, ast.expr], *, roots: str) -> Site:
    keys = set(_keys(reached, roots))
    whole = roots.rstrip(".")
    parts = {id(node.value) for node in reached if isinstance(node, ast.Attribute)}
    if any(isinstance(node, ast.expr) and id(node) not in parts and ast.unparse(node) == whole for node in reached):
        keys.add("")
    return Site(
        file=file, assigned=assigned, keys=frozenset(keys), optional=frozenset(_keys_with_default(reached, roots))
    )


def _keys(nodes: Sequence[ast.AST] | Iterator[ast.AST], root: str) -> Iterator[str]:
    """The longest chains of attributes behind ``root``, and keys that ``.get`` reads there."""
    nodes = list(nodes)
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and id(node) not in inner and ast.unparse(node).startswith(root):
            chain = ast.unparse(node).removeprefix(root)
            if chain.rpartition(".")[2] != "get":
                yield chain
    yield from _keys_with_default(nodes, root)


def _keys_with_default(nodes: Sequence[ast.AST], root: str) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="get", value=section), args=[ast.Constant(value=str(name)), *_]):
                above = ast.unparse(section)
                if f"{above}.".startswith(root):
                    yield f"{above}.{name}".removeprefix(root)


def _class(source: ast.Module | None, name: str) -> ast.ClassDef | None:
    found = source.body if source is not None else []
    return next((node for node in found if isinstance(node, ast.ClassDef) and node.name == name), None)


def _methods(owner: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in owner.body if isinstance(node, ast.FunctionDef)]


def _function(owner: ast.ClassDef | None, name: str) -> ast.FunctionDef | None:
    return next((each for each in _methods(owner) if each.name == name), None) if owner is not None else None


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
