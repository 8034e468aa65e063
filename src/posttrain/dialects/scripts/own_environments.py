"""Environments that a program on SkyRL registers: in its own file, or in a package of the checkout that it imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from posttrain.checkout_files import file_of, parsed
from posttrain.dialects.scripts.own_options import given_options, options_of

_OVERRIDDEN = re.compile(r"""\+*trainer\.override_entrypoint=["']?([\w.]+)["']?""")
_MOST_FILES = 60  # of a checkout that are looked through


def registered_environments(file: Path | None, words: Sequence[str], roots: Sequence[Path]) -> tuple[str, ...]:
    """Return overrides for the environments that a program registers: ``register(id="mine", entry_point="module:Class")``.

    The entry point may stand in a table of the program's, ``PLACES[variant]`` with ``--variant sft`` in its command. Packages
    that it imports, and those of the command's ``trainer.override_entrypoint``, register with ``f"{__name__}.module:Class"``,
    also in a loop over names.

    Args: ``file`` of the program, None for the peer's own; ``words`` of its command.
    """
    found: dict[str, str] = {}
    source = parsed(file) if file is not None else None
    if source is not None:
        found |= _registered(source, _tables(source), given_options(words, options_of(source)))
    starts = [place for word in words if (named := _OVERRIDDEN.fullmatch(word)) for place in _files(named[1], roots)]
    for place, package in _imported([*starts, *([file] if file is not None else [])], roots):
        found = _registered(package, _tables(package), {}, place) | found
    return tuple(f"+posttrain.environment.settings.register.{name}='{where}'" for name, where in found.items())


def _registered(
    source: ast.Module,
    tables: Mapping[str, Mapping[str, str]],
    options: Mapping[str, str],
    package: Path | None = None,
) -> dict[str, str]:
    """Return the calls of ``register`` in a file: id -> entry point. Args: ``package``, the folder of a package's file, where
    only entry points of its own modules count."""
    found: dict[str, str] = {}
    for node, names in _calls(source):
        written = {one.arg: one.value for one in node.keywords}
        written |= dict(zip(("id", "entry_point"), node.args, strict=False))
        place = (
            _own_module(written.get("entry_point"), package)
            if package
            else _text(written.get("entry_point"), tables, options)
        )
        own = written.get("id")
        ids = names.get(own.id, ()) if isinstance(own, ast.Name) else (_text(own, tables, options),)
        found |= {name: place for name in ids if re.fullmatch(r"\w+", name) and ":" in place}
    return found


def _calls(source: ast.Module) -> Iterator[tuple[ast.Call, dict[str, tuple[str, ...]]]]:
    """The calls of ``register``, each with the texts that the variables of loops around it take."""
    loops = [
        (node, node.target.id, tuple(text for each in node.iter.elts if (text := _text(each, {}, {}))))
        for node in ast.walk(source)
        if isinstance(node, ast.For)
        and isinstance(node.target, ast.Name)
        and isinstance(node.iter, ast.Tuple | ast.List)
    ]
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "register":
            around = {name: texts for loop, name, texts in loops if any(each is node for each in ast.walk(loop))}
            yield node, around


def _own_module(node: ast.AST | None, package: Path) -> str:
    """Return ``f"{__name__}.bird:BirdEnv"`` as the file and class that it means; "" for another, or without such a file."""
    match node:
        case ast.JoinedStr(
            values=[ast.FormattedValue(value=ast.Name(id="__name__")), ast.Constant(value=str() as rest)]
        ):
            module, _, name = rest.removeprefix(".").partition(":")
            file = package.joinpath(*module.split(".")).with_suffix(".py")
            return f"{file}:{name}" if name and file.is_file() else ""
    return ""


def _imported(starts: Sequence[Path], roots: Sequence[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """The packages (``__init__.py``) that files of a checkout import, or stand in, with the folder of each; each once."""
    queue, seen = list(starts), set[Path]()
    while queue and len(seen) < _MOST_FILES:
        file = queue.pop(0)
        if file in seen or (source := parsed(file)) is None:
            continue
        seen.add(file)
        if file.name == "__init__.py":
            yield file.parent, source
        queue += _modules(source, file, roots)


def _modules(source: ast.Module, file: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """The files of the checkout that a file imports at its top, packages around them among them."""
    for node in source.body:
        match node:
            case ast.Import(names=names):
                for each in names:
                    yield from _files(each.name, roots)
            case ast.ImportFrom(module=module, names=names, level=0) if module:
                yield from _files(module, roots)
                yield from (place for each in names for place in _files(f"{module}.{each.name}", roots)[-1:])
            case ast.ImportFrom(module=module, names=names, level=level) if level <= len(file.parents):
                folder = file.parents[level - 1].joinpath(*(module or "").split("."))
                yield from (place for each in ("", *(each.name for each in names)) for place in _in(folder, each))
                if (beside := file_of(f"{'.' * level}{module or ''}", file, roots)) is not None:
                    yield beside


def _files(module: str, roots: Sequence[Path]) -> list[Path]:
    """Return the files of a dotted name below the first root that has its module: the packages around it, then its own."""
    parts = module.split(".")
    for root in roots:
        last = [*_in(root.joinpath(*parts), ""), *_in(root.joinpath(*parts[:-1]), parts[-1])]
        if last:
            around = [root.joinpath(*parts[:count], "__init__.py") for count in range(1, len(parts))]
            return [*(each for each in around if each.is_file()), last[0]]
    return []


def _in(folder: Path, name: str) -> list[Path]:
    """The file of a package, or of a module or package below it."""
    places = [folder / name / "__init__.py", *([folder / f"{name}.py"] if name else [])]
    return [place for place in places if place.is_file()]


def _tables(source: ast.Module) -> dict[str, dict[str, str]]:
    """The tables of texts that stand at the top of a program, by name."""
    found = {}
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            texts = {_text(key, {}, {}): _text(value, {}, {}) for key, value in pairs}
            found[node.targets[0].id] = texts
    return found


def _text(node: ast.AST | None, tables: Mapping[str, Mapping[str, str]], options: Mapping[str, str]) -> str:
    """A text that is written in a program, or that an option of its command takes out of one of its tables; "" for another."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Subscript(value=ast.Name(id=table), slice=ast.Name(id=option) | ast.Attribute(attr=option)):
            return tables.get(table, {}).get(options.get(option, ""), "")
    return ""
