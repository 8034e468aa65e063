"""A user's own Python file or module, found by its path, read, and imported."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from posttrain.errors import ConfigError, Problem, nearest

# How a path says that it is a module's name, or a file's.
PACKAGE = "pkg://"
FILE = "file://"

# What pip calls a package, by its import name, where more than a dash differs.
PIP_NAMES = {
    "bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "dotenv": "python-dotenv", "faiss": "faiss-cpu",
    "fitz": "pymupdf", "PIL": "pillow", "rouge": "rouge-score", "skimage": "scikit-image", "sklearn": "scikit-learn",
    "pkg_resources": "'setuptools<81'", "yaml": "pyyaml",
}  # fmt: skip


def source_file(path: str, *, holds: str = "your function") -> Path:
    """The file behind a path: my.py, ~/my.py, file:///home/ann/my.py, or pkg://package.module. Imports nothing.

    Raises: ConfigError when there is none.
    """
    if path.startswith(PACKAGE):
        return module_file(path.removeprefix(PACKAGE), asked=path)
    file = Path(path.removeprefix(FILE)).expanduser()
    if not file.is_file():
        fix = f"name the Python file that holds {holds}"
        if "/" not in path and "." in path and not path.endswith(".py"):
            fix = f"a module is written {PACKAGE}{path}"
        elif near := nearest(file.name, [each.name for each in file.parent.glob("*.py")]):
            fix = f"did you mean {file.with_name(near)}?"
        raise ConfigError(Problem(f"there is no file {path}", fix=fix, field="path"))
    return file.resolve()


def module_file(module: str, *, asked: str) -> Path:
    """The file of a module, found part by part: to ask for a submodule at once would import the packages around it.

    Raises: ConfigError.
    """
    folders: list[str] | None = None
    file = None
    for count in range(1, len(parts := module.split(".")) + 1):
        name = ".".join(parts[:count])
        # Last below the folder of the launch, which `python -m` searches, too
        outside = importlib.util.find_spec(name) if folders is None else None
        spec = outside or PathFinder.find_spec(name, [os.getcwd()] if folders is None else folders)
        if spec is None or (spec.origin is None and spec.submodule_search_locations is None):
            what = f"there is no module {name} (asked for: {asked})"
            there = {each.name for each in pkgutil.iter_modules(folders)} - sys.stdlib_module_names
            near = nearest(parts[count - 1], sorted(there))
            meant = ".".join([*parts[: count - 1], near or ""])
            fix = f"did you mean {meant}?" if near else "install the package, or put its folder on PYTHONPATH"
            raise ConfigError(Problem(what, fix=fix, field="path"))
        file, folders = spec.origin, list(spec.submodule_search_locations or [])
    if file is None or not file.endswith(".py"):
        raise ConfigError(Problem(f"{asked} is not a Python file", fix="name a module in it", field="path"))
    return Path(file).resolve()


def absolute(path: str) -> str:
    """The same path for a process in another folder."""
    return path if path.startswith(PACKAGE) else str(source_file(path))


def parse_file(path: str, file: Path) -> ast.Module:
    """The syntax tree of a file, which ``path`` names. Raises: ConfigError."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        raise ConfigError(Problem(f"{path} cannot be read: {error.strerror}", field="path")) from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        what = f"{place} is not Python: {getattr(error, 'msg', error)}"
        raise ConfigError(Problem(what, field="path")) from error


def bound_names(tree: ast.Module) -> set[str]:
    """Return the names that are imported, assigned or defined anywhere in a file, where a function may be defined without
    def; ``*`` for ``from x import *``. Only importing the file can decide."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


def import_path(path: str) -> ModuleType:
    """Run the file or module. Files of the same name in different folders stay apart; an unchanged file runs
    once.

    Raises: ConfigError, with the user's own file and line where importing it fails.
    """
    file = source_file(path)
    try:
        if path.startswith(PACKAGE):
            search_launch_folder()
            return importlib.import_module(path.removeprefix(PACKAGE))
        return _import_file(file)
    except (Exception, SystemExit) as error:  # a user's program: it may fail in any way, and its exit() is not ours
        if isinstance(error, ConfigError):
            raise
        asked = path if path.startswith(PACKAGE) else "the file"
        what = f"{place_of(error, str(file))}: importing {asked} failed: {last_line(error)}"
        raise ConfigError(Problem(what, fix=_missing(error), field="path")) from error


def _missing(error: BaseException) -> str:
    """The fix for an import of a module that is not there; "" for another error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    wanted = PIP_NAMES.get(package, package.replace("_", "-"))
    return f"pip install {wanted}, or put the folder that holds {package} on PYTHONPATH"


def search_launch_folder() -> None:
    """Let a user's code import what lies in the folder of the launch, as `python -m` does: last, so it replaces no library."""
    if (launched := os.getcwd()) not in sys.path:
        sys.path.append(launched)


def _import_file(file: Path) -> ModuleType:
    digest = hashlib.sha256(str(file).encode() + b"\0" + file.read_bytes()).hexdigest()[:12]
    name = f"{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    search_launch_folder()
    return run_file(name, file)


def run_file(name: str, file: Path) -> ModuleType:
    """Run a file as the module ``name``, from its text: Python's own cache takes a file that was changed within a second,
    to the same length, for unchanged. One that imports files beside it (``from .judge import score``) is a module of their
    package, whose own ``__init__.py`` is not run.

    Raises: whatever the file raises; then there is no such module.
    """
    package = _package_of(file)
    names = [f"{package}.{name}", name] if package else [name]
    spec = importlib.util.spec_from_file_location(names[0], file, loader=_FromText(names[0], str(file)))
    assert spec is not None and spec.loader is not None  # a loader is given
    module = importlib.util.module_from_spec(spec)
    sys.modules |= dict.fromkeys(names, module)  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for each in names:
            sys.modules.pop(each, None)
        raise
    return module


def _package_of(file: Path) -> str:
    """Make the packages around a file that imports by them, without a run of theirs, and return the name of the innermost; ""
    for a file without such imports."""
    try:
        imports = [node.level for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.ImportFrom)]
    except (OSError, SyntaxError, ValueError):
        return ""
    if not any(imports):
        return ""
    around = [file.parent]
    while len(around) < max(imports) or (around[0] / "__init__.py").is_file():
        if around[0].parent == around[0]:
            break
        around.insert(0, around[0].parent)
    name = ""
    for folder in around:
        step = folder.name if name else f"of_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        name = f"{name}.{step}" if name else step
        if name not in sys.modules:
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(folder)]
    return name


class _FromText(SourceFileLoader):
    """Python's loader without compiled files, neither read nor left beside the user's own."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_statements(module: ModuleType, file: Path, statements: list[ast.stmt]) -> None:
    """Run statements of a file in a module, which keeps what they define. Raises: whatever they raise."""
    _FromStatements(module.__name__, str(file), statements).exec_module(module)


class _FromStatements(SourceFileLoader):
    """Python's loader for a part of a file."""

    def __init__(self, name: str, path: str, statements: list[ast.stmt]):
        super().__init__(name, path)
        self._statements = statements

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(ast.Module(body=self._statements, type_ignores=[]), self.path)


def place_of(error: BaseException, file: str) -> str:
    """file:line of the last frame in the user's own file, however deep in a library the error was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def defined_at(function: object) -> str:
    """file:line of the definition of a function or class; its name where it has no source."""
    plain = inspect.unwrap(function) if callable(function) else function
    code = getattr(plain, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]}"  # type: ignore[arg-type]
    except (TypeError, OSError):
        return str(getattr(plain, "__name__", plain))


def own_line(error: BaseException) -> str:
    """file:line of the last frame of an error that lies neither in this package nor in a library; in a library where all others
    do; "" where none is left."""
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(package)]
    paths = sysconfig.get_paths()
    libraries = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = [each for each in frames if not each.filename.startswith(("<", *libraries))] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def failed_at(error: BaseException, function: object) -> str:
    """file:line where a user's function failed: the last line of its own file, or its definition where the call itself did."""
    defined = defined_at(function)
    place = place_of(error, defined.rpartition(":")[0])
    return place if ":" in place else defined


def loading_problem(error: BaseException, folder: Path, what: str) -> Problem:
    """Describe why ``what``, code of the checkout ``folder``, cannot be loaded: with the last file and line there and the package
    to install where one is missing."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).is_relative_to(folder)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name:
        end = f"ends the program (exit code {error.code})" if isinstance(error, SystemExit) else ""
        return Problem(f"{place}{what} {end or f'cannot be loaded: {last_line(error)[:600]}'}")
    package = name.partition(".")[0]
    if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
        lacks = f"{place}{what} needs {name}, which is not in {folder}"
        return Problem(lacks, fix="take the whole checkout, at one commit, with its submodules")
    if name != package:
        lacks = f"{place}{what} needs {name}, which the installed {package} does not have"
        return Problem(lacks, fix=f"install the version of {package} that the fork's own pages name")
    lacks = f"{place}{what} needs the package {package}, which is not installed"
    wanted = PIP_NAMES.get(package, package.replace("_", "-"))
    return Problem(lacks, fix=f"pip install {wanted}, or as the fork's own pages say", library=package)


def last_line(error: BaseException) -> str:
    """The error as Python's traceback ends with it."""
    return traceback.format_exception_only(error)[-1].strip()
