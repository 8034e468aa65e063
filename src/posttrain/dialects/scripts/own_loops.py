"""The training loop of a checkout beside verl's own: the calls of its ``fit`` that verl's trainer does not make.

A fork keeps verl's name of the program, ``verl.trainer.main_ppo``, and changes the loop behind it. Files are parsed, never run.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.checkout_files import file_of, parsed
from posttrain.dialects.scripts.asks import Ask, Part
from posttrain.dialects.scripts.guards import Guarded, code_of, guarded
from posttrain.dialects.scripts.own_managers import DONE_HERE, handed_on, managers_of
from posttrain.dialects.scripts.own_rewards import program_rewards, unknown_rewards
from posttrain.dialects.scripts.own_sources import imports_of
from posttrain.dialects.scripts.own_workers import own_workers
from posttrain.dialects.scripts.peer_trainers import LOOP_CALLS
from posttrain.dialects.scripts.recipes import recipe_of
from posttrain.dialects.scripts.trainers import ENTRY_POINTS, Trainer
from posttrain.dialects.words import OUR_SECTION, OWN_REWARDS
from posttrain.verl_advantages import TRAINER as VERLS_TRAINER
from posttrain.verl_advantages import TrainerEstimator, find_in_trainer
from posttrain.verl_episodes import NotPlayable, find_loop, find_reward
from posttrain.verl_updates import ALGORITHMS, changed_updates

INSTEAD = (
    "give its keys to verl's own loop: posttrain plan --dialect verl KEY=VALUE ...; or write an environment of your own"
)
_TRAINER = "verl.trainer.main_ppo"
_LOOP = "fit"
_SAMPLER = "actor_rollout_wg"  # verl's attribute of the workers that sample
_SCORES = re.compile(r"reward_fn|compute_(?:\w+_)?(?:reward|rm_score)|extract_reward")
# Methods of tensors, arrays and texts, and parts of the standard library: they say nothing about the algorithm
_PLAIN = frozenset(
    """DataProto GenerationConfig arange argmax argsort array_equal basename batch_encode_plus bool clone cuda dirname eq expand
    findall float flatten from_dict from_numpy full ge group gt int isfinite isinf isnan json listdir loads long lt match ne
    nonzero no_grad now numel ones_like path permute read repeat_interleave reshape run search seed set_description squeeze stack
    strftime sub sum tokenizer transpose unique unsqueeze where zeros_like""".split()  # noqa: SIM905
)
_COMMON = {*dir(builtins), *(name for kind in (str, list, dict, set) for name in dir(kind)), *_PLAIN}
# Calls that report: metrics, logs, timers, files of samples
_REPORTS = re.compile(
    r"(?i)(?:^|_)(?:log(?!_?probs?)|logs|logger|print|dump|metrics?|wandb|tracking|timer|progress|table|status|header|profil\w*"
    r"|histogram|save|write|summary|records?|stats|statistics)(?:_|$)|(?:tracking|timer)$"
)
# Objects whose every call reports
_REPORTERS = re.compile(r"(?i)(?:^|_)(?:logger|wandb|swanlab|mlflow|tracking|progress)(?:_|$)")
_SAMPLES = "passes the sampler to"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoop:
    """A trainer's loop of a checkout, where it differs from verl's."""

    name: str  # CLASS.fit
    title: str  # with its place: CLASS.fit (line N of FILE)
    calls: Mapping[str, int]  # names of calls that verl's loop does not make -> line
    file: Path
    chosen_by: str = ""  # the key that chooses this trainer, where the launch leaves it open
    method: ast.FunctionDef
    source: ast.Module
    samples: str = ""  # the call that the sampler's workers are passed to
    given: ast.Call | None = None  # the same
    beside: tuple[str, ...] = ()  # attributes of the trainer that this call gets, too
    scores: bool = True  # rewards are computed in the loop


def own_calls(
    method: ast.FunctionDef | ast.AsyncFunctionDef, own: set[str], theirs: frozenset[str] = LOOP_CALLS
) -> dict[str, int]:
    """Return the calls of a loop that the peer's loop, verl's unless ``theirs`` are given, does not make, with their lines;
    ``own`` are the methods of its class."""
    found: dict[str, int] = {}
    bars = _progress_bars(method)
    for node in ast.walk(method):
        if not isinstance(node, ast.Call):
            continue
        name, owner = _called(node), _owner(node)
        if not name or name in theirs or name in _COMMON:
            continue
        if _REPORTS.search(name) or _REPORTERS.search(owner) or owner in bars:
            continue
        if name in own or not name.startswith("__"):
            found.setdefault(name, node.lineno)
    return found


def _progress_bars(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of tqdm's bars, all of whose calls report."""
    made = [node for node in ast.walk(method) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    named = [(node.targets[0], _called(node.value)) for node in made if isinstance(node.value, ast.Call)]
    return {
        target.attr if isinstance(target, ast.Attribute) else target.id
        for target, made_by in named
        if made_by in ("tqdm", "trange") and isinstance(target, ast.Attribute | ast.Name)
    }


def with_loop(trainer: Trainer, roots: Sequence[Path], words: Sequence[str] = ()) -> Trainer:
    """Compare a checkout's loop, and its advantages, losses and updates, with verl's own. See ``_compared``."""
    trainer = _compared(trainer, roots, words)
    places = (*roots, *(root / "verl" for root in roots))
    home = next((root for root in places if (root / ALGORITHMS).is_file()), None)
    if trainer.module != _TRAINER or trainer.refused or home is None:
        return trainer
    return replace(trainer, asks=(*trainer.asks, *_of_updates(home)))


def _compared(trainer: Trainer, roots: Sequence[Path], words: Sequence[str]) -> Trainer:
    """Compare the loop of a checkout with verl's own, for a program that is called like one of verl's.

    Args: ``roots`` are the folders that the program may stand below; ``words`` of its command choose among several trainers.
    Returns: the trainer, with the overrides of an environment where its sampler plays episodes that can be played here, and with
        something to confirm where its loop makes further calls, computes no rewards, or plays otherwise.
    """
    if (recipe := recipe_of(trainer.written)) is not None:
        return replace(trainer, asks=_of_recipe(trainer, recipe.asks)) if recipe.asks else trainer
    is_peers = any(f".{trainer.written}".endswith(f".{name}") for name in ENTRY_POINTS)
    taken = f"{trainer.written} is taken for {trainer.module} by its name; it is parsed, not run"
    trainer = replace(
        trainer, notes=trainer.notes or (() if is_peers else (taken,)), instead=trainer.instead or INSTEAD
    )
    if trainer.module != _TRAINER:
        return trainer
    asks = list(trainer.asks)
    path = Path(*trainer.written.split(".")).with_suffix(".py")
    found = list(_loops(trainer.written, [*roots, *(root / "verl" for root in roots)], words))
    if open_key := next((loop.chosen_by for _, loop in found if loop.chosen_by), ""):
        why = f"which of its trainers trains depends on {open_key}, and the launch does not set it"
        fix = f"write {open_key}=true or {open_key}=false into the launch"
        return replace(trainer, refused=why, instead=fix)
    for root, loop in found:
        parts: list[Part | str] = []
        sources = [each for each in (loop.source, parsed(root / path)) if each is not None]
        managers = managers_of(root / path, loop.beside, roots) if loop.samples else None
        if managers is not None:
            played = f"{managers.function} (line {managers.line} of {managers.file})"
            what = f"{loop.title} passes the sampler and what {played} makes to {loop.samples}"
            note = f"{what}: the environment env_manager plays it"
            trainer = replace(trainer, notes=(*trainer.notes, note), adds=(*trainer.adds, *managers.adds))
            estimator = _estimator(loop.file, words)
            done = (
                DONE_HERE
                | {loop.samples.partition(" ")[0]}
                | (estimator.calls if estimator is not None else frozenset())
            )
            if estimator is not None and not loop.file.match(VERLS_TRAINER):
                trainer = replace(trainer, adds=(*trainer.adds, f"++{OUR_SECTION}.advantage.path='{loop.file}'"))
            loop = replace(loop, calls={name: line for name, line in loop.calls.items() if name not in done})
        elif loop.given is not None:
            name = loop.samples.partition(" ")[0]
            try:
                trainer, accounted = _played(trainer, loop, root)
            except NotPlayable as error:
                why = f", which plays episodes of its own ({error}) where a run samples single responses"
                parts.append(
                    Part(before=_SAMPLES, calls={name: [guarded(code_of(loop.method, sources), loop.given)]}, after=why)
                )
                accounted = frozenset({name})
            loop = replace(loop, calls={name: line for name, line in loop.calls.items() if name not in accounted})
        if not loop.scores:
            parts.append("computes no rewards, because its own sampler scores, where a run calls reward functions")
        parts += [
            Part(before="calls", calls=places_of(loop.method, loop.calls, sources), after=", which verl's does not")
        ]
        ask = Ask(
            field=loop.name,
            title=f"the checkout's own loop, {loop.title},",
            parts=tuple(parts),
            end=": a run calls none",
            meant="confirm by name that verl's loop is meant",
        )
        asks = [each for each in asks if each.field != loop.name]
        asks += [ask] if ask.what else []
    plays = any(each.startswith(f"+{OUR_SECTION}.environment.name=") for each in trainer.adds)
    program = next((root / path for root in roots if (root / path).is_file()), None)
    adds = list(trainer.adds)
    if program is not None and (workers := own_workers(program, roots)) is not None:
        asks.append(workers)
    if program is not None and not plays:
        if program_rewards(program, roots) is not None:
            adds.append(f"+{OWN_REWARDS}='{program.absolute()}'")
        elif find_reward(program, list(roots)) is None and (unknown := unknown_rewards(program)) is not None:
            asks.append(unknown)
    return replace(trainer, asks=tuple(asks), adds=tuple(adds))


def _of_updates(root: Path) -> Iterator[Ask]:
    """The confirmations of what a checkout has changed in verl's advantages, losses and updates."""
    for file, changed in changed_updates(root).items():
        yield Ask(
            field=Path(file).stem,
            title=f"the checkout has changed verl's {file}:",
            parts=(Part(before="", calls={each.name: [each] for each in changed}),),
            end="; no version of verl has that, and a run computes verl's",
            meant="confirm by name that verl's are meant",
        )


def _of_recipe(trainer: Trainer, does: str) -> tuple[Ask, ...]:
    """The confirmation of a recipe whose algorithm is not here."""
    return (
        Ask(
            field=trainer.written.rpartition(".")[2],
            title=f"the recipe {trainer.written} is more than PPO or GRPO:",
            parts=(does,),
            end="; a run does not do that",
            meant="confirm by name that PPO or GRPO with these keys is meant",
        ),
    )


def places_of(
    method: ast.FunctionDef, calls: Collection[str], sources: Sequence[ast.Module]
) -> dict[str, list[Guarded]]:
    """Return every place of a function at which it makes one of these calls."""
    found: dict[str, list[Guarded]] = {name: [] for name in calls}
    code = code_of(method, sources) if calls else None
    for node in ast.walk(method):
        if code is not None and isinstance(node, ast.Call) and (name := _called(node)) in found:
            found[name].append(guarded(code, node))
    return found


def _estimator(trainer: Path, words: Sequence[str]) -> TrainerEstimator | None:
    """The estimator of a trainer's own that the command chooses; None without one."""
    given = [
        word.partition("=")[2] for word in words if word.partition("=")[0].lstrip("+") == "algorithm.adv_estimator"
    ]
    return find_in_trainer(trainer, given[-1]) if given else None


def _played(trainer: Trainer, loop: OwnLoop, root: Path) -> tuple[Trainer, frozenset[str]]:
    """The trainer with the overrides that let the class of its loop play, and the calls of the loop that this accounts for.

    Raises: NotPlayable.
    """
    owner, _, fit = loop.name.partition(".")
    program = (root / Path(*trainer.written.split("."))).with_suffix(".py")
    found = find_loop(loop.file, owner, fit, [root], program)
    settings = {"trainer": f"{loop.file}:{loop.name}", "folder": root, "program": program}
    adds = [f"+{OUR_SECTION}.environment.name=verl_loop"]
    adds += [f"+{OUR_SECTION}.environment.settings.{name}='{value}'" for name, value in settings.items()]
    note = f"{found.title} plays the episodes, in a process of its own"
    return replace(trainer, adds=(*trainer.adds, *adds), notes=(*trainer.notes, note)), found.accounted


def _loops(module: str, roots: Sequence[Path], words: Sequence[str]) -> Iterator[tuple[Path, OwnLoop]]:
    """The loops of the trainers that a program builds, by its dotted name, each with the folder that it is imported from. Of
    trainers that the program chooses by a key, the one that ``words`` choose."""
    path = Path(*module.split(".")).with_suffix(".py")
    root = next((root for root in roots if (root / path).is_file()), None)
    source = parsed(root / path) if root is not None else None
    if root is None or source is None:
        return
    built = {_called(node) for node in ast.walk(source) if isinstance(node, ast.Call)}
    built |= {
        node.value.id for node in ast.walk(source) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
    }
    choices = _choices(source)
    for name, given in imports_of(source).items():
        if not given.name.endswith("Trainer") or name not in built:
            continue
        key, wanted = choices.get(name, ("", True))
        value = _value_in(words, key) if key else wanted
        if value is not None and value != wanted:
            continue
        file = file_of(given.module, root / path, [root, *roots])
        if file is not None and (loop := _loop(given.name, file)) is not None:
            yield root, replace(loop, chosen_by=key if value is None else "")


def _choices(source: ast.Module) -> dict[str, tuple[str, bool]]:
    """The trainers that a program names below ``if config.KEY``: the key, and its value for this trainer."""
    found: dict[str, tuple[str, bool]] = {}
    for node in ast.walk(source):
        test = ast.unparse(node.test).removeprefix("not ") if isinstance(node, ast.If) else ""
        if not isinstance(node, ast.If) or not re.fullmatch(r"(?:self\.)?config(?:\.\w+)+", test):
            continue
        denied = isinstance(node.test, ast.UnaryOp)
        for statements, value in ((node.body, not denied), (node.orelse, denied)):
            names = {each.id for part in statements for each in ast.walk(part) if isinstance(each, ast.Name)}
            found |= {each: (test.partition("config.")[2], value) for each in names if each.endswith("Trainer")}
    return found


def _value_in(words: Sequence[str], key: str) -> bool | None:
    """The value of a key in a command; None where it is not given as true or false."""
    given = [word.partition("=")[2].lower() for word in words if word.partition("=")[0].lstrip("+") == key]
    return {"true": True, "false": False}.get(given[-1]) if given else None


def _loop(name: str, file: Path) -> OwnLoop | None:
    """The loop of a class, its own or that of a class of the same file; None where neither has one."""
    source = parsed(file)
    if source is None:
        return None
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    while (definition := classes.pop(name, None)) is not None:
        methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
        if (method := methods.get(_LOOP)) is not None:
            calls = {_called(node) for node in ast.walk(method) if isinstance(node, ast.Call)}
            further = [each for each in methods.values() if each.name in calls and each.name != "_validate"]
            names = {
                ast.unparse(node)
                for each in (method, *further)
                for node in ast.walk(each)
                if isinstance(node, ast.Name | ast.Attribute)
            }
            given = _given_the_sampler(method)
            return OwnLoop(
                name=f"{name}.{_LOOP}",
                title=f"{name}.{_LOOP} (line {method.lineno} of {file})",
                calls=own_calls(method, set(methods)),
                file=file,
                method=method,
                source=source,
                given=given,
                samples=f"{_called(given)} (line {given.lineno})" if given else "",
                beside=tuple(handed_on(given)) if given else (),
                scores=any(_SCORES.search(each) for each in names),
            )
        name = next((base.id for base in definition.bases if isinstance(base, ast.Name)), "")
    return None


def _given_the_sampler(method: ast.FunctionDef) -> ast.Call | None:
    """The call of a loop that gets verl's sampling workers as an argument; None without one."""
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and (name := _called(node)) not in LOOP_CALLS and name not in _COMMON:
            values = [*node.args, *(one.value for one in node.keywords)]
            if any(isinstance(each, ast.Attribute) and each.attr == _SAMPLER for each in values):
                return node
    return None


def _owner(node: ast.Call) -> str:
    """The name of the object whose method is called; "" for a function."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""


def _called(node: ast.Call) -> str:
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
