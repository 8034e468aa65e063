"""Programs of the user's own that build a peer's trainer: found in a checkout and parsed, never run.

A program that imports verl's RayPPOTrainer, its main_ppo or SFT trainer, or SkyRL's BasePPOExp starts that trainer with the same
keys. The parts that it replaces are named; one that changes the algorithm is refused with its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.checkout_files import file_of, parsed
from posttrain.dialects.scripts import own_generators
from posttrain.dialects.scripts.asks import Ask, Part
from posttrain.dialects.scripts.own_environments import registered_environments
from posttrain.dialects.scripts.own_loops import own_calls, places_of, with_loop
from posttrain.dialects.scripts.own_options import options_of
from posttrain.dialects.scripts.own_sources import imports_of
from posttrain.dialects.scripts.own_trainers import difference, own_manager, runner_of, with_loop_estimator
from posttrain.dialects.scripts.peer_trainers import OUTSIDE_THE_LOOP, RUN_CALLS, SKYRL_PARTS, Peer
from posttrain.dialects.scripts.registered import with_registered
from posttrain.dialects.scripts.trainers import GENERATES, Trainer, keys_asked_by, trainer_of

# Commands that may name a program without starting it
_SHOWS = {
    *("echo", "printf", "cat", "head", "tail", "wc", "diff", "grep", "egrep", "sed", "awk", "test", "[", "which"),
    *("ls", "find", "cp", "mv", "ln", "rm", "mkdir", "touch", "chmod", "git", "ps", "pgrep", "pkill", "killall"),
}
_ITS_KEYS = (
    "write its values under verl's keys (of EasyR1, worker.actor is actor_rollout_ref.actor): "
    "posttrain plan --dialect verl KEY=VALUE ..."
)
_DEPTH = 3  # files of base classes that are followed


def started_by(words: Sequence[str], roots: Sequence[Path]) -> tuple[int, Trainer] | None:
    """The place of the word in a command that starts a trainer, and the trainer; None for another command.

    Args: ``roots`` are folders that a program of the user's own may stand below: the current one, those above the script.
    """
    if not words or words[0].rpartition("/")[2] in _SHOWS:
        return None
    for place, word in enumerate(words):
        if (trainer := trainer_of(word)) is not None and not _is_read_by_another(words, place):
            file = _program(words, place, roots)
            if trainer.dialect == "verl":
                trainer = with_loop(trainer, roots, words)
                return place, trainer if file is None else with_registered(trainer, file, words, roots)
            if file is None:
                return place, replace(trainer, adds=(*trainer.adds, *registered_environments(None, words, roots)))
            return place, with_registered(_with_parts(trainer, file, word, tuple(roots)), file, words, roots)
    for place, word in enumerate(words):
        file = _program(words, place, roots)
        trainer = _trainer(file, word, tuple(roots)) if file is not None else None
        if trainer is not None and trainer.dialect == "verl":
            if trainer.refused:
                return place, trainer
            trainer = with_loop_estimator(with_loop(trainer, roots, words), words)
            return place, trainer if file is None else with_registered(trainer, file, words, roots)
        if trainer is not None and file is not None:
            return place, with_registered(trainer, file, words, roots)
    return None


def _is_read_by_another(words: Sequence[str], place: int) -> bool:
    """Return True for a trainer's file that is an argument of another Python file, without overrides of its own:
    ``python patch.py --target verl/trainer/main_ppo.py``."""
    return (
        any(word.endswith(".py") for word in words[:place])
        and words[0].rpartition("/")[2].startswith("python")
        and words[place].endswith(".py")
        and not any("=" in word for word in words[place + 1 :])
    )


def _program(words: Sequence[str], place: int, roots: Sequence[Path]) -> Path | None:
    """The file of a word that names a program: a module behind -m, or a file."""
    word = words[place]
    is_module = place > 0 and words[place - 1] == "-m" and re.fullmatch(r"\w+(\.\w+)*", word)
    if not is_module and not re.fullmatch(r"[\w./-]+\.py", word):
        return None
    path = Path(*word.split(".")).with_suffix(".py") if is_module else Path(word)
    # Beside the script: its folder may have been renamed after the script was written
    beside = [roots[1] / path.name] if len(roots) > 1 else []
    return next((file for file in (*(root / path for root in roots), *beside) if file.is_file()), None)


def _with_parts(trainer: Trainer, file: Path, word: str, roots: tuple[Path, ...]) -> Trainer:
    """Add what an example of SkyRL's, or a program called like one, puts in the place of its parts."""
    found = _trainer(file, word, roots, of_the_peer=True) if trainer.dialect == "skyrl" else None
    if found is None:
        return trainer
    adds = tuple(each for each in found.adds if each not in keys_asked_by(trainer))
    return replace(trainer, refused=found.refused, adds=(*trainer.adds, *adds))


@dataclass(slots=True)
class _Replaced:
    """Parts of the peer's trainer that a program replaces."""

    notes: list[str] = field(default_factory=list)
    refused: str = ""
    asks: list[Ask] = field(default_factory=list)
    sets_up: str = ""  # refused of a user's program: it makes the peer's workers and samplers in its own way
    adds: list[str] = field(default_factory=list)  # overrides that say the same
    generator: str = ""  # of the program's own, on SkyRL: it plays the episodes
    runs: str = ""  # its experiment, where that has a run of its own
    rows: bool = False  # it reads them by its own get_train_dataset
    roots: tuple[Path, ...] = ()


def _trainer(file: Path, word: str, roots: tuple[Path, ...], *, of_the_peer: bool = False) -> Trainer | None:
    """The trainer that a program builds; one of the peer's own may set its workers up in its own way."""
    source = parsed(file)
    if source is None:
        return None
    found = list(_peers(file, source, roots, _DEPTH))
    if not found:
        return None
    peer = found[0].peer
    replaced = _Replaced(
        [f"{word} is a program of your own that builds {peer.name}; it is parsed, not run"], roots=roots
    )
    seen = set()
    for one in found:
        hidden: set[str] = set()  # by classes that derive from the given one
        for definition, place in one.classes:
            if (definition, one.peer) not in seen:
                _look_at_class(definition, place, one.peer, replaced, frozenset(hidden))
            seen.add((definition, one.peer))
            hidden |= {each.name for each in definition.body if isinstance(each, ast.FunctionDef)}
    for theirs in dict.fromkeys(one.peer for one in found):
        _look_at_patches(file, source, roots, theirs, replaced)
    if peer.dialect == "verl":
        _look_at_rewards(file, source, replaced)
        replaced.refused = _own_configuration(file, source) or replaced.refused
    if replaced.generator and replaced.runs:  # nothing else would call the generator
        why = f"{replaced.runs} has a run of its own, which begins another loop than SkyRL's"
        replaced.refused = replaced.refused or why
    if replaced.generator:
        replaced.adds += own_generators.overrides_of(file, word, reads_rows=replaced.rows)
    written = word.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
    return Trainer(
        peer.module,
        peer.dialect,
        written,
        notes=tuple(replaced.notes),
        refused=replaced.refused or ("" if of_the_peer else replaced.sets_up),
        adds=tuple(replaced.adds),
        asks=tuple(replaced.asks),
        options=options_of(source) if peer.dialect == "skyrl" else {},
        instead=_ITS_KEYS if replaced.refused and _own_configuration(file, source) else "",
    )


def _own_configuration(file: Path, source: ast.Module) -> str:
    """The reason for which a program on verl's trainer takes other keys than verl's: it makes its configuration of a dataclass,
    as EasyR1 does; "" for one that reads files."""
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "OmegaConf.structured" and node.args:
            made = ast.unparse(node.args[0]).removesuffix("()")
            return (
                f"its configuration is {made} (line {node.lineno} of {file}), whose keys are not those of verl's files"
            )
    return ""


@dataclass(frozen=True, slots=True)
class _Found:
    peer: Peer
    classes: tuple[tuple[ast.ClassDef, Path], ...] = ()  # subclasses of the peer's own, with their files


def _peers(file: Path, source: ast.Module, roots: tuple[Path, ...], depth: int) -> Iterator[_Found]:
    """The peers' trainers that a file imports or derives from; one with subclasses first."""
    imported = imports_of(source)
    defined = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    plain: list[_Found] = []
    for each in imported.values():
        if each.peer is not None:
            plain.append(_Found(each.peer))
        elif each.name.endswith(("Trainer", "Exp", "TaskRunner")) and (inner := file_of(each.module, file, roots)):
            within = parsed(inner)
            if within is not None and (chain := _chain(each.name, inner, within, roots, depth)):
                yield chain
    for name in defined:
        if chain := _chain(name, file, source, roots, depth):
            yield chain
    yield from plain


def _chain(name: str, file: Path, source: ast.Module, roots: tuple[Path, ...], depth: int) -> _Found | None:
    """The class and those that it derives from, up to the peer's own; None where it does not derive from one."""
    definition = next((node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if definition is None or not depth:
        return None
    imported = imports_of(source)
    for base in definition.bases:
        above = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
        given = imported.get(above)
        if given is not None and given.peer is not None:
            return _Found(given.peer, ((definition, file),))
        inner = file_of(given.module, file, roots) if given else file
        within = parsed(inner) if inner else None
        if inner and within and (further := _chain(given.name if given else above, inner, within, roots, depth - 1)):
            return _Found(further.peer, ((definition, file), *further.classes))
    return None


def _look_at_class(
    definition: ast.ClassDef, file: Path, peer: Peer, replaced: _Replaced, hidden: frozenset[str]
) -> None:
    """Note the methods of a subclass that replace the peer's own, and refuse those that change the algorithm."""
    own = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    overridden = [name for name in own if name in peer.methods and name not in hidden]
    if said := [name for name in overridden if name != "get_generator"]:
        listed = ", ".join(f"{name} (line {own[name].lineno})" for name in said)
        replaced.notes.append(
            f"{definition.name} of {file}:{definition.lineno} overrides {listed}, which are not called"
        )
    if peer.dialect == "skyrl" and "run" in own:
        _look_at_run(own, f"{definition.name} (line {own['run'].lineno} of {file})", replaced)
    if peer.dialect == "verl" and (runner := runner_of(definition, file, replaced.roots)):
        replaced.adds += runner
    elif peer.dialect == "verl" and (plays := own_manager(definition, file, replaced.roots)):
        ask = Ask(
            field=definition.name,
            title=f"{definition.name} (line {definition.lineno} of {file})",
            parts=(f"samples by a manager of its own: {plays}",),
            end="; a run samples single responses, or plays what the configuration says",
            meant="confirm by name that verl's own sampling is meant",
        )
        replaced.asks.append(ask)
    for name in overridden:
        _look_at_method(own[name], f"{definition.name}.{name}", file, peer, replaced, set(own))


def _look_at_run(own: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef], title: str, replaced: _Replaced) -> None:
    """Take over a run of an experiment's own that trains as SkyRL's does, or asks the generator alone, and note another."""
    called, further = set[str](), {"run"}
    while further:
        bodies = [own[name] for name in further]
        more = {
            ast.unparse(node.func).rpartition(".")[2]
            for body in bodies
            for node in ast.walk(body)
            if isinstance(node, ast.Call)
        }
        further = (more - called) & {name for name in own if not name.startswith("get_") and name != "run"}
        called |= more
    if called <= RUN_CALLS and "train" in called:
        return
    if "generate" in called and not called & {"train", "_setup_trainer", "get_trainer", "fit"}:
        replaced.adds += GENERATES
        replaced.notes.append(
            f"{title} has a run that generates alone: here the rows of data.val_data get one response each, and their scores"
        )
        return
    replaced.runs = replaced.runs or title


def _look_at_method(
    method: ast.FunctionDef | ast.AsyncFunctionDef,
    title: str,
    file: Path,
    peer: Peer,
    replaced: _Replaced,
    own: set[str],
) -> None:
    if method.name == "get_train_dataset":
        replaced.rows = True
    if replaced.refused or method.name in OUTSIDE_THE_LOOP:
        return
    if peer.dialect != "verl":
        _look_at_part(method, title, file, replaced)
        return
    if isinstance(method, ast.FunctionDef) and (calls := own_calls(method, own)):
        sources = [each for each in (parsed(file),) if each is not None]
        part = Part(
            before="calls",
            calls=places_of(method, calls, sources),
            after=f", which {peer.name} does not: a run calls none",
        )
        replaced.asks.append(
            Ask(
                field=title,
                title=f"{title} (line {method.lineno} of {file})",
                parts=(part,),
                meant=f"confirm by name that {peer.name}'s own is meant",
            )
        )


def _look_at_part(method: ast.FunctionDef | ast.AsyncFunctionDef, title: str, file: Path, replaced: _Replaced) -> None:
    """Take over a part of SkyRL's own that a method returns, and refuse another."""
    made = [node.func for node in ast.walk(method) if isinstance(node, ast.Call)]
    names = [each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in made]
    parts = [name for name in names if re.fullmatch(r"[A-Z]\w*(?:Generator|Trainer|TrainerSim)", name)]
    if len(parts) == 1 and parts[0] in SKYRL_PARTS:
        replaced.adds += [each for each in SKYRL_PARTS[parts[0]] if each not in replaced.adds]
        return
    part = parts[0] if parts else "another part"
    what = f"{title} (line {method.lineno} of {file}) puts {part} in the place of its own"
    if method.name not in ("get_generator", "get_trainer"):
        replaced.sets_up = replaced.sets_up or what
        return
    if method.name == "get_generator" and not replaced.refused:
        replaced.generator = replaced.generator or part
        return
    if part.endswith("TrainerSim"):
        replaced.refused = (
            f"{what}: it sleeps in the place of training, to measure samplers, and nothing would be trained"
        )
        return
    differs = difference(part, file, replaced.roots) if parts else "it is no trainer's class"
    if not differs:
        replaced.notes.append(f"{part} makes the calls of SkyRL's trainer and no others; it is not called")
        return
    replaced.refused = f"{what}: {differs}"


def _look_at_patches(file: Path, source: ast.Module, roots: tuple[Path, ...], peer: Peer, replaced: _Replaced) -> None:
    """``RayPPOTrainer.fit = fit``: a method of the peer's class that the program replaces."""
    imported = imports_of(source)
    for node in ast.walk(source):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
            continue
        target = node.targets[0]
        if not (isinstance(target.value, ast.Name) and isinstance(node.value, ast.Name)):
            continue
        theirs, given = imported.get(target.value.id), imported.get(node.value.id)
        if theirs is None or theirs.peer is not peer:
            continue
        place = file_of(given.module, file, roots) if given else file
        within = parsed(place) if place else None
        functions = {each.name: each for each in within.body if isinstance(each, ast.FunctionDef)} if within else {}
        method = functions.get(given.name if given else node.value.id)
        title = f"{target.value.id}.{target.attr}"
        replaced.notes.append(f"{title} is replaced at {file}:{node.lineno}; the replacement is not called")
        if method is None or place is None:
            replaced.refused = (
                replaced.refused or f"{title} is replaced at {file}:{node.lineno} by code that is not here"
            )
        else:
            _look_at_method(method, title, place, peer, replaced, set())


def _look_at_rewards(file: Path, source: ast.Module, replaced: _Replaced) -> None:
    """A score function that the program passes on is verl's custom_reward_function; other reward code is named."""
    functions = {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(source):
        for given in node.keywords if isinstance(node, ast.Call) else ():
            if not isinstance(given.value, ast.Name):
                continue
            if given.arg == "compute_score" and given.value.id in functions:
                replaced.adds += [
                    f"++custom_reward_function.path={file}",
                    f"++custom_reward_function.name={given.value.id}",
                ]
                return
    for node in ast.walk(source):
        made = node.value if isinstance(node, ast.Assign) else None
        targets = (
            [each.id for each in node.targets if isinstance(each, ast.Name)] if isinstance(node, ast.Assign) else []
        )
        if "reward_fn" in targets and isinstance(made, ast.Call):
            maker = ast.unparse(made.func)
            replaced.notes.append(
                f"reward_fn is made by {maker} at {file}:{made.lineno}, which is not called: scores come from "
                "the rows' data_source, or from custom_reward_function"
            )
            return
