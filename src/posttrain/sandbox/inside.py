"""The last thing that runs in a boxed process: the program itself.

This is the only file of the package that executes text from a model. It is imported by the warden and called in a process that
has put up its walls; nothing in this process's memory says what answer is expected.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from types import ModuleType
from typing import Any, Never

NAME = "program.py"
RESULT_FD = 3

# Names that programs written for judges use without importing them, and the modules they are from.
_KNOWN: dict[str, str] = {
    **dict.fromkeys(
        ("List", "Dict", "Set", "Tuple", "Optional", "Union", "Any", "Deque", "DefaultDict", "Iterable", "Callable"),
        "typing",
    ),
    **dict.fromkeys(("defaultdict", "deque", "Counter", "OrderedDict", "namedtuple"), "collections"),
    **dict.fromkeys(("lru_cache", "cache", "reduce", "cmp_to_key", "partial"), "functools"),
    **dict.fromkeys(("heappush", "heappop", "heapify", "heappushpop", "heapreplace", "nlargest", "nsmallest"), "heapq"),
    **dict.fromkeys(("bisect_left", "bisect_right", "insort", "insort_left", "insort_right"), "bisect"),
    **dict.fromkeys(
        ("accumulate", "chain", "combinations", "permutations", "product", "groupby", "count", "cycle", "zip_longest"),
        "itertools",
    ),
    **dict.fromkeys(
        ("gcd", "lcm", "sqrt", "ceil", "floor", "comb", "factorial", "inf", "isqrt", "log", "log2"), "math"
    ),
    **dict.fromkeys(("ascii_lowercase", "ascii_uppercase", "digits"), "string"),
}
_MODULES = frozenset(
    ("math", "collections", "itertools", "functools", "heapq", "bisect", "random", "re", "string", "sys", "operator")
)
_NO_NAME = str.maketrans(
    dict.fromkeys(map(chr, (*range(48), *range(58, 65), *range(91, 95), 96, *range(123, 128))), " ")
)


def run(source: str, function: str | None, arguments: Any) -> Never:
    """Run a program to its end, or load it and call one of its functions with the arguments; the result goes to RESULT_FD
    as JSON. The process ends as Python's own would: threads are waited for, exit functions run, output is written."""
    code = 1
    streams: list[Any] = []
    try:
        streams = _tidy()
        main = ModuleType("__main__" if function is None else "solution")
        sys.modules[main.__name__] = main
        code = _run(source, function, arguments, main.__dict__)
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        if atexit := sys.modules.get("atexit"):
            atexit._run_exitfuncs()
        main.__dict__.clear()  # files that it has opened and not closed are written when they go
        gc.collect()
    except BaseException:  # noqa: BLE001 - the stack below belongs to the warden
        code = 1
    for stream in (sys.stdout, sys.stderr, *streams):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001 - the program may have put anything here
            code = code or 1
    os._exit(code)


def _run(source: str, function: str | None, arguments: Any, names: dict[str, Any]) -> int:
    """The exit code."""
    names["__file__"] = NAME
    try:
        program = compile(source, NAME, "exec", dont_inherit=True)
        _offer_known_names(source, names)
        exec(program, names)  # noqa: S102 - what this process is for
        if function is not None:
            _answer(_find(function, names)(*map(_with_number_keys, arguments)))
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - reported as Python does, from the program's own first line on
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _find(function: str, names: dict[str, Any]) -> Any:
    """The function, or the method of a class Solution."""
    solution = names.get("Solution")
    return getattr(solution(), function) if solution is not None and hasattr(solution, function) else names[function]


def _with_number_keys(value: Any) -> Any:
    """JSON has text keys only: a mapping whose keys are all whole numbers as text had numbers."""
    if isinstance(value, dict) and value and all(key.lstrip("-").isdecimal() for key in value):
        return {int(key): each for key, each in value.items()}
    return value


def _answer(value: Any) -> None:
    data = json.dumps(value).encode()
    while data:
        data = data[os.write(RESULT_FD, data) :]


def _offer_known_names(source: str, names: dict[str, Any]) -> None:
    """Names that a judge's own preamble would have imported, where the source mentions them."""
    words = set(source.translate(_NO_NAME).split())
    for module in sorted(words & _MODULES):
        names[module] = importlib.import_module(module)
    for name in sorted(words & _KNOWN.keys()):
        names[name] = getattr(importlib.import_module(_KNOWN[name]), name)


def _tidy() -> list[Any]:
    """Make the process look like a Python that was started to run one program. Returns its output streams."""
    for name in [name for name in sys.modules if name.split(".")[0] == "posttrain"]:
        del sys.modules[name]
    library = os.path.dirname(os.__file__)
    sys.path[:] = [library, os.path.join(library, "lib-dynload")]
    sys.path_importer_cache.clear()
    sys.argv[:] = [NAME]
    os.environ.clear()
    stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - the program closes it, or it stays open
    stdout, stderr = (open(fd, "w", encoding="utf-8", errors="replace", closefd=False) for fd in (1, 2))  # noqa: SIM115
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return [stdout, stderr]
