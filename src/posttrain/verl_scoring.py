"""verl's own scoring code, of any date: the definitions of a checkout that no version of verl has are a fork's own.

A fork keeps verl's names, ``RewardManager``, ``default_compute_score``, and changes what they compute. ``verl_scoring.json``
holds a digest of every definition in the history of verl's scoring files; ``tools/verl_scoring.py`` writes it. Files are parsed,
never run.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path

from posttrain.checkout_files import parsed

DIGITS = 8  # of a digest, hexadecimal
# Folders and files of verl whose definitions make up its scoring
MAIN = "verl/trainer/main_ppo.py"
SCORES = "verl/utils/reward_score"
CODE = (
    MAIN,
    "verl/trainer/ppo/reward.py",
    "verl/workers/reward_manager",
    "verl/experimental/reward_loop/reward_manager",
    SCORES,
)
# Parts of a syntax tree that change nothing: hints of types, and where a name stands
_SAYS_NOTHING = frozenset(("annotation", "returns", "ctx", "kind", "type_comment", "type_params", "type_ignores"))


def root_of(program: Path) -> Path:
    """Return the folder that a program's modules are imported from: the one around its outermost package."""
    root = program.parent
    while (root / "__init__.py").is_file() and root.parent != root:
        root = root.parent
    return root


def own_definitions(file: Path, names: Collection[str] | None = None) -> list[str]:
    """Return the names at the top of a file whose definitions no version of verl has; of ``names`` alone, where they are given.
    Empty for a file that cannot be parsed."""
    source = parsed(file)
    found = definitions(source) if source is not None else iter(())
    own = (name for name, digest in found if digest not in _known() and (names is None or name in names))
    return list(dict.fromkeys(own))


def own_scores(start: Path, root: Path) -> list[str]:
    """Return the definitions of a checkout's scorers that verl does not have, each as ``name (FILE)``: of the files in ``SCORES``
    that the file ``start`` imports, itself or through others there."""
    folder = root / SCORES
    found: dict[Path, None] = {}
    left = [start]
    while left:
        file = left.pop()
        if file in found:
            continue
        found[file] = None
        left += [each for each in _imported(file, root) if each.is_relative_to(folder)]
    return [f"{name} ({file})" for file in found if file.is_relative_to(folder) for name in own_definitions(file)]


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """The files of the checkout that a file imports, also inside its functions."""
    source = parsed(file)
    for node in ast.walk(source) if source is not None else ():
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [module, *(f"{module}{'' if module.endswith('.') else '.'}{one.name}" for one in node.names)]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            continue
        for name in names:
            yield from _files(name, file, root)


def _files(module: str, beside: Path, root: Path) -> Iterator[Path]:
    """The file of a module, or of a package, below the checkout."""
    above = len(module) - len(module.lstrip("."))
    place = beside.parents[above - 1] if 0 < above <= len(beside.parents) else root
    path = place.joinpath(*filter(None, module.strip(".").split(".")))
    yield from (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file())


def definitions(source: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the functions, classes and assigned names at the top of a file, each with a digest of its code. Comments, docstrings,
    hints of types and layout change no digest."""
    for node in source.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, digest_of(node)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if name != "__all__":
                yield name, digest_of(node)


def digest_of(node: ast.AST) -> str:
    """Return the digest of a definition."""
    return hashlib.sha256("\n".join(_parts(node)).encode()).hexdigest()[:DIGITS]


def _parts(node: ast.AST) -> Iterator[str]:
    """Names of the nodes and their values, in the order of the code."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in _SAYS_NOTHING:
            continue
        values = value if isinstance(value, list) else [value]
        if name == "body" and isinstance(value, list) and _is_docstring(value[0] if value else None):
            values = value[1:]
        if not values or value is None:
            continue
        yield f".{name}"
        for each in values:
            if isinstance(each, ast.AST):
                yield from _parts(each)
            else:
                yield repr(each)


def _is_docstring(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    text = Path(__file__).with_suffix(".json").read_text("utf-8")
    digests: str = json.loads(text)["digests"]
    return frozenset(digests[at : at + DIGITS] for at in range(0, len(digests), DIGITS))
