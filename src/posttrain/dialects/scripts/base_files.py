"""The file that a trainer's program starts from, and its arguments as ``posttrain`` takes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from posttrain.config.reading.overrides import parse_overrides
from posttrain.dialects.reader import SHIPPED_IN
from posttrain.dialects.scripts.own_options import without_options
from posttrain.dialects.scripts.recipes import Recipe, recipe_of
from posttrain.dialects.scripts.trainers import BASE_FILES, HOLDS, RENAMED, Trainer, keys_asked_by
from posttrain.errors import ConfigError, Problem

_PATH_OPTIONS = ("--config-path", "-cp", "--config_path")
_NAME_OPTIONS = ("--config-name", "-cn", "--config_name")


def arguments_of(trainer: Trainer, words: Sequence[str], roots: Iterable[Path], where: str = "") -> tuple[str, ...]:
    """The arguments that a trainer's words mean.

    Args: ``words`` follow the program in its command. ``roots`` are folders that the program's file may stand below: the
        current one, those above the script. ``where`` is the script's line.
    Raises: ConfigError for a recipe, or a program of the user's own, whose algorithm is not here.
    """
    check_refused(trainer, where)
    roots = list(roots)
    rest, named = _named_file(without_options(words, trainer.options))
    base = _base(trainer, named, roots)
    if trainer.module in RENAMED:
        rest = [*HOLDS[trainer.module], *_renamed(trainer, rest)]
    if (
        trainer.written.startswith("skyrl.")
        or ".skyrl." in trainer.written
        or trainer.written.startswith("examples.train")
    ):
        rest = [_quoted(word) for word in rest]
    return (*base, *(_found(word, roots) for word in rest), *trainer.adds, *keys_asked_by(trainer))


def check_refused(trainer: Trainer, where: str = "") -> None:
    """Raises: ConfigError for a recipe, or a program of the user's own, whose algorithm is not here."""
    recipe = _recipe(trainer)
    if recipe is not None and recipe.refused:
        what = f"{trainer.written} is refused: {recipe.refused}"
        fix = "name verl.trainer.main_ppo in the script to train by PPO or GRPO with these keys"
        raise ConfigError(Problem(what, fix=fix, where=where))
    if trainer.refused:
        fix = trainer.instead or f"name {trainer.module} in the script to train by its own loop with these keys"
        raise ConfigError(Problem(f"{trainer.written} is refused: {trainer.refused}", fix=fix, where=where))


def _recipe(trainer: Trainer) -> Recipe | None:
    """The recipe of a program; SkyRL's examples have names of verl's."""
    return recipe_of(trainer.written) if trainer.dialect == "verl" else None


def _quoted(word: str) -> str:
    """A word of a program that reads its arguments with OmegaConf alone, where any text may stand behind the =: in quotes where
    Hydra's grammar does not take it (``dataset_split=train[:200]``)."""
    key, equals, value = word.partition("=")
    if not equals or value[:1] in ("", "'", '"', "[", "{", "$"):
        return word
    try:
        parse_overrides([word])
    except ConfigError:
        text = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"{key}='{text}'"
    return word


def _found(word: str, roots: Iterable[Path]) -> str:
    """A word with the folders of ``hydra.searchpath=[file://...]`` as they are found below the roots."""
    if not word.lstrip("+").startswith("hydra.searchpath="):
        return word

    def place(listed: re.Match[str]) -> str:
        folder = Path(listed[1])
        found = (root / folder for root in roots if not folder.is_absolute() and (root / folder).is_dir())
        return f"file://{next(found, folder)}"

    return re.sub(r"file://([\w./-]+)", place, word)


def _named_file(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take Hydra's options out of a trainer's words."""
    rest: list[str] = []
    named: dict[str, str] = {}
    following = iter(words)
    for word in following:
        option, equals, value = word.partition("=")
        kind = "path" if option in _PATH_OPTIONS else "name" if option in _NAME_OPTIONS else ""
        if kind:
            named[kind] = value if equals else next(following, "")
        else:
            rest.append(word)
    return rest, named


def _base(trainer: Trainer, named: dict[str, str], roots: Sequence[Path]) -> tuple[str, ...]:
    """The file that the trainer reads: one on this disk, or the name of one that the peer ships, or what such a file holds."""
    recipe = _recipe(trainer)
    usual = recipe.file if recipe is not None else BASE_FILES.get(trainer.module, "")
    if trainer.module in RENAMED:
        return (usual,)
    mains = (root / _file_of(trainer.written) for root in roots)
    program = next((main for main in mains if main.is_file()), None)
    own_folder, own_name = _hydra_main(program) if program is not None else ("", "")
    name = named.get("name") or own_name or usual or ("config" if "path" in named else "")
    if not named and recipe is None and (shipped := _of_checkout(trainer, own_folder, name, roots)) is not None:
        return (str(shipped),)
    if not name or (name.removesuffix(".yaml") == "ppo_trainer" and "path" not in named and "name" not in named):
        return ()
    if name == usual and recipe is None and not named:
        return (name,)  # known by its name
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    path = Path(named.get("path") or own_folder or "config").expanduser()
    home = _file_of(trainer.written).parent  # which Hydra's paths start from
    # Of a path below the current folder, also its part there: the script's users may start it in another one
    below = [path.relative_to(roots[0])] if roots and path.is_absolute() and path.is_relative_to(roots[0]) else []
    for root in roots:
        for part in (home / path, path, *below):
            if (root / part / file).is_file():
                return (str(root / part / file),)
    # A placeholder for the checkout's own folder may stand before it: base_dir/recipe/deepeyes/configs
    for root in roots if not path.is_absolute() else ():
        for count in range(1, len(path.parts)):
            if (inside := root.joinpath(*path.parts[count:], file)).is_file():
                return (str(inside),)
    if recipe is not None and name.removesuffix(".yaml") == recipe.file:
        return recipe.holds
    if recipe is not None and name.removesuffix(".yaml") == recipe.file.replace("_ppo_", "_ppo_megatron_"):
        return ("--config-name", "ppo_megatron_trainer.yaml", *recipe.holds)
    if not named:
        return (name,) if name == usual else ()
    return ("--config-path", str(path), "--config-name", file) if "path" in named else ("--config-name", file)


def _of_checkout(trainer: Trainer, own_folder: str, name: str, roots: Sequence[Path]) -> Path | None:
    """The file that verl's own program reads where it stands in a checkout, whose values may be a fork's. A repository may hold
    that checkout in a folder ``verl`` of its own, and a package that builds on verl a file beside its program. None where no
    such file is there."""
    if trainer.dialect != "verl" or not name:
        return None
    file = f"{name.removesuffix('.yaml')}.yaml"
    beside = [_file_of(trainer.written).parent / own_folder] if own_folder else []
    folders: list[Path | str] = [*beside, SHIPPED_IN, f"verl/{SHIPPED_IN}"]
    places = (root / folder / file for root in roots for folder in folders)
    found = next((place for place in places if place.is_file()), None)
    return found.relative_to(Path.cwd()) if found is not None and found.is_relative_to(Path.cwd()) else found


def _file_of(module: str) -> Path:
    return Path(*module.split(".")).with_suffix(".py")


@cache
def _hydra_main(program: Path) -> tuple[str, str]:
    """The folder and the name of the file that ``@hydra.main(config_path=..., config_name=...)`` of a program names.

    The program is parsed, not run. "" for what it does not say in plain text.
    """
    try:
        tree = ast.parse(program.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return "", ""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
            continue
        if ast.unparse(node.func) not in ("hydra.main", "main"):
            continue
        given = {one.arg: one.value.value for one in node.keywords if isinstance(one.value, ast.Constant)}
        folder, name = given.get("config_path"), given.get("config_name")
        if isinstance(name, str):
            return folder if isinstance(folder, str) else ".", name.removesuffix(".yaml")
    return "", ""


def _renamed(trainer: Trainer, words: Sequence[str]) -> list[str]:
    """The words of a program that takes the keys of another one's file."""
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        for old, new in RENAMED[trainer.module].items():
            if f"{key}.".startswith(f"{old}."):
                key = key.replace(old, new, 1)
                break
        found.append(f"++{key}={value}" if equals else word)
    return found
