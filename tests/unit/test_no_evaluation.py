"""Text from a model, a dataset or a checkpoint is data: nothing in the package evaluates, executes or unpickles it.

The exceptions are the two files whose text runs in a boxed process: one is imported only by the process that makes boxes; the
other, which runs the tests of repaired repositories, is imported by no module, and its text is sent into the box.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from posttrain.config.reading import plain_yaml
from posttrain.libraries import yaml_text
from sources import FILES, PACKAGE, nodes_of

BOXED = PACKAGE / "sandbox/inside.py"
WARDEN = PACKAGE / "sandbox/warden.py"
SENT_INTO_BOXES = PACKAGE / "envs/repair/in_box.py"
# By the last name of what is called: eval, builtins.eval, pickle.loads, sympy.sympify, …
NAMES = {"eval", "exec", "parse_expr", "sympify", "unsafe_load", "full_load"}
PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
SAFE_YAML = {"SafeLoader", "CSafeLoader", "BaseLoader", "_Loader", "_LOADER"}  # for the last two see below
# Methods of the same names that are something else: model.eval() switches dropout off.
METHODS = {"eval"}


def findings(nodes: Iterable[ast.AST]) -> list[str]:
    """Calls that would evaluate or unpickle, as "line: call"."""
    found = []
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["UnpicklingError"]:
                continue  # what a refusal is caught by
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{node.lineno}: import {each}" for each in modules if each and each.split(".")[0] in PICKLERS]
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        is_method = name in METHODS and owner not in ("", "builtins") and not node.args
        unsafe = (
            (name in NAMES and not is_method)
            or (owner == "torch" and name == "load" and ast.unparse(named.get("weights_only", node)) != "True")
            or (owner in ("np", "numpy") and name == "load" and "allow_pickle" in named)
            or (
                owner == "yaml"
                and name == "load"
                and not any(ast.unparse(each).split(".")[-1] in SAFE_YAML for each in [*node.args[1:], *named.values()])
            )
        )
        if unsafe:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def imported(path: Path) -> set[str]:
    """The modules, and what is imported from them, that a file names in import statements."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def test_two_files_execute_and_only_in_a_box() -> None:
    [call] = findings(nodes_of(BOXED))
    assert call.endswith(": exec(program, names)")
    [call] = findings(nodes_of(SENT_INTO_BOXES))
    assert call.endswith(": exec(compile(self.files[file], file, 'exec', dont_inherit=True), module.__dict__)")
    names = {
        "inside": "posttrain.sandbox.inside",
        "warden": "posttrain.sandbox.warden",
        "sent": "posttrain.envs.repair.in_box",
    }
    everywhere = {path: imported(path) for path in FILES}
    importers = {name: {path for path in FILES if module in everywhere[path]} for name, module in names.items()}
    # A warden is started as a process, and the last is sent as text.
    assert importers == {"inside": {WARDEN}, "warden": set(), "sent": set()}


def test_a_loader_of_yaml_of_our_own_makes_plain_values() -> None:
    assert yaml_text._LOADER in (yaml.SafeLoader, yaml.CSafeLoader)
    assert issubclass(plain_yaml._Loader, yaml.SafeLoader | yaml.CSafeLoader)
    assert set(plain_yaml._Loader.yaml_constructors) == set(yaml.SafeLoader.yaml_constructors)
    assert not plain_yaml._Loader.yaml_multi_constructors


def test_the_package_evaluates_and_unpickles_nothing() -> None:
    found = {path: findings(nodes_of(path)) for path in FILES if path not in (BOXED, SENT_INTO_BOXES)}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        *("eval(x)", "exec(x)", "builtins.eval(x)", "import pickle", "from pickle import loads", "torch.load(f)"),
        *("torch.load(f, weights_only=False)", "yaml.load(f)", "yaml.load(f, yaml.Loader)", "yaml.unsafe_load(f)"),
        *("np.load(f, allow_pickle=True)", "import cloudpickle as c", "sympy.sympify(x)", "sympy.parse_expr(x)"),
    ],
)
def test_the_check_finds(source: str) -> None:
    assert findings(ast.walk(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "torch.load(f, weights_only=True)", "yaml.safe_load(f)", "yaml.load(f, Loader=yaml.SafeLoader)"],
)
def test_the_check_lets_pass(source: str) -> None:
    assert findings(source) == []
