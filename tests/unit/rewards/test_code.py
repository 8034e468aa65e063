"""Programs scored by test cases: right ones, wrong ones, and those that try to be called right."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.built_in import built_in
from posttrain.rewards.code_tests import cases_of, code_of, returned, same_output, same_value
from posttrain.rewards.load import check_data_sources, check_rewards, load_rewards
from posttrain.rewards.scorer import ScorerInWorkers
from posttrain.sandbox import layers
from posttrain.sandbox.walls import WALLS

linux = pytest.mark.skipif(sys.platform != "linux", reason="boxes are made by Linux")

# Two numbers are added.
STDIN = {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}
FUNCTION = {"inputs": [[1, 2], [30, 4]], "outputs": [3, 34], "fn_name": "add"}
RIGHT_STDIN = "a, b = map(int, input().split())\nprint(a + b)"
RIGHT_FUNCTION = "def add(a, b):\n    return a + b"


def prompt(truth: Any, source: str = "apps", **extra: object) -> Prompt:
    return Prompt(
        prompt_id="a:0", token_ids=(1,), text="?", data_source=source, ground_truth=truth, extra_info=dict(extra)
    )


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\nDone."


def score(source: str, truth: Any, **options: Any) -> float:
    result = built_in("code", options)(prompt(json.dumps(truth)), fenced(source))
    assert isinstance(result, dict)
    return result["score"]


@linux
@pytest.mark.parametrize(
    ("source", "truth"),
    [
        (RIGHT_STDIN, STDIN),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", STDIN),
        ("print(sum(map(int, open(0).read().split())))", STDIN),
        (f"{RIGHT_STDIN}\nimport sys\nprint('thinking', file=sys.stderr)\nsys.exit(0)", STDIN),
        (RIGHT_FUNCTION, FUNCTION),
        ("class Solution:\n    def add(self, a: int, b: Optional[int]) -> List[int]:\n        return a + b", FUNCTION),
        (f"{RIGHT_FUNCTION}\nprint('debugging')\nif __name__ == '__main__':\n    raise SystemExit(5)", FUNCTION),
        (RIGHT_FUNCTION, {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}),
        (RIGHT_FUNCTION, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}),  # wrapped
        ("def add(a, b):\n    return ((a, b), {1: a})", {**FUNCTION, "outputs": [[[1, 2], {"1": 1}], [[30, 4], {"1": 30}]]}),
        ("def add(m):\n    return m[3]", {"inputs": [[{"3": 4}]], "outputs": [4], "fn_name": "add"}),
        (RIGHT_FUNCTION, [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]),
        (RIGHT_STDIN, [{"input": "1 2", "output": "3", "testtype": "stdin"}]),
        (RIGHT_STDIN, [{"stdin": "1 2", "expected_stdout": "3"}]),
    ],
)  # fmt: skip
def test_right_programs(source: str, truth: Any) -> None:
    assert score(source, truth) == 1.0


@linux
@pytest.mark.parametrize(
    ("source", "truth", "share"),
    [
        ("print(3)", STDIN, 0.5),
        ("a, b = map(int, input().split())\nprint(a - b)", STDIN, 0.0),
        (f"{RIGHT_STDIN}\nraise ValueError", STDIN, 0.0),  # right output, and an error
        (f"{RIGHT_STDIN}\nprint(1)", STDIN, 0.0),
        ("def add(a, b):\n    return 3", FUNCTION, 0.5),
        ("def add(a, b):\n    return str(a + b)", FUNCTION, 0.0),
        ("def sub(a, b):\n    return a - b", FUNCTION, 0.0),
        ("def add(a):\n    return 3", FUNCTION, 0.0),
        ("def add(a, b:\n    return 3", FUNCTION, 0.0),
        ("def add(a, b):\n    return {a + b}", FUNCTION, 0.0),
        ("def add(a, b):\n    return float('nan')", FUNCTION, 0.0),
        ("def add(a, b):\n    return a + b == 3", {"inputs": [[1, 2]], "outputs": [1], "fn_name": "add"}, 0.0),  # True
        ("", STDIN, 0.0),
    ],
)
def test_wrong_programs(source: str, truth: Any, share: float) -> None:
    assert score(source, truth) == 0.0
    assert score(source, truth, continuous=True) == share


# Each of them wins where the check and the program share a process, an exit code or a stream of output.
HACKS = {
    "exit 0": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "pass tokens": "print('PASS'); print('True'); print('OK'); print('1 passed'); print({'passed': True}); print([True, True])",
    "always equal": """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __str__(self): return "7"
    __repr__ = __str__
class SameText(str):
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0
def add(a, b): return Same()
add2 = lambda a, b: SameText("x")
print(Same())""",
    "always equal, as a number": """
class Same(int):
    def __eq__(self, other): return True
    __hash__ = lambda self: 0
def add(a, b): return Same(7)
print(SystemExit)""",
    "patched builtins": """
import builtins, operator
for name in ("all", "any", "bool", "isinstance"):
    setattr(builtins, name, lambda *a, **k: True)
operator.eq = lambda a, b: True
def add(a, b): return 7
builtins.print("x")""",
    "patched test runner": """
import sys, types
for name in ("unittest", "pytest", "posttrain", "checker"):
    sys.modules[name] = types.ModuleType(name)
for module in list(sys.modules.values()):
    for name in list(vars(module)):
        if any(word in name.lower() for word in ("passes", "check", "verify", "same", "compare", "score", "run_test")):
            try: setattr(module, name, lambda *a, **k: True)
            except Exception: pass
def add(a, b): return 7""",
    "patched json": """
import json, json.encoder
json.dumps = lambda value, *a, **k: '{"passed": true, "score": 1.0, "result": true}'
json.JSONEncoder.encode = lambda self, value: "true"
json.encoder.JSONEncoder.encode = lambda self, value: "true"
def add(a, b): return 7""",
    "searched frames": """
import gc, sys
def add(*given):
    seen, frame = [], sys._getframe()
    while frame:
        seen += [value for value in frame.f_locals.values()] + [value for value in frame.f_globals.values()]
        frame = frame.f_back
    seen += gc.get_objects()
    for each in seen:
        if isinstance(each, dict):
            for key in ("expected", "outputs", "output", "expected_output", "answer", "ground_truth", "solution"):
                if isinstance(each.get(key), (int, str, list)):
                    return each[key][0] if isinstance(each[key], list) and each[key] else each[key]
        for key in ("expected", "outputs", "ground_truth"):
            if hasattr(each, key) and isinstance(getattr(each, key), (int, str)):
                return getattr(each, key)
print(add())""",
    "searched files": """
import glob, os
found = []
for pattern in ("/proc/*/environ", "/proc/*/cmdline", "/proc/self/fd/*", "/scratch/*", "/tmp/*", "*", "../*", "/*/*.json"):
    for path in glob.glob(pattern):
        try: found.append(open(path).read())
        except OSError: pass
for fd in range(3, 64):
    try: found.append(os.read(fd, 1 << 16).decode())
    except Exception: pass
text = "".join(found)
def add(a, b): return 34 if "34" in text and a != 30 else 7
print("34" if "34" in text else "")""",
    "wrote results": """
import os
for fd in range(3, 64):
    for text in (b"true", b'{"passed": true}', b"[true, true]", b"null"):
        try: os.write(fd, text)
        except OSError: pass
def add(a, b): os._exit(0)""",
    "exit functions": """
import atexit, os
def last():
    os.write(1, b"PASS")
    os._exit(0)
atexit.register(last)
def add(a, b): return 7
raise SystemExit""",
    "output with everything in it": "print('\\n'.join(map(str, range(1000))))\ndef add(a, b): return list(range(1000))",
    "late threads": """
import threading, time
def late():
    time.sleep(0.2)
    print("PASS")
threading.Thread(target=late).start()
def add(a, b): return None""",
    "forked printers": """
import os
try:
    if os.fork() == 0:
        while True: os.write(1, b"3\\n34\\n")
except OSError:
    pass
def add(a, b): return [3, 34]
print("3")
print("34")""",
    "another stdout": """
import io, sys
class Out(io.StringIO):
    def getvalue(self): return "34"
    __eq__ = lambda self, other: True
sys.stdout = sys.__stdout__ = Out()
print("anything")
def add(a, b): return Out()""",
    "a string that is the code": "def add(a, b): return '__import__(\"os\")._exit(0)'\nprint('__import__(\"os\")._exit(0)')",
    "endless recursion": "def add(a, b): return add(a, b)\nadd(1, 1)",
    "an endless value": "x = []\nx.append(x)\ndef add(a, b): return x\nprint(x)",
    "a deep value": "x = []\nfor _ in range(100000): x = [x]\ndef add(a, b): return x\nprint('[' * 100000)",
    "numbers without end": "def add(a, b): return 10 ** 5000\nprint('9' * 100000)",
}


@linux
@pytest.mark.parametrize("name", HACKS)
@pytest.mark.parametrize("truth", [STDIN, FUNCTION], ids=["stdin", "function"])
def test_no_hack_wins(name: str, truth: Any) -> None:
    assert score(HACKS[name], truth, continuous=True, timeout_s=2.0) == 0.0


@linux
def test_a_program_that_hangs_fails_alone() -> None:
    begin = time.monotonic()
    reward = built_in("code", {"timeout_s": 0.5, "continuous": True})
    sources = ["while True: pass", RIGHT_STDIN, "import time; time.sleep(600)", RIGHT_STDIN, "9**9**9", RIGHT_STDIN]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda source: reward(prompt(STDIN), fenced(source)), sources))

    assert [result["score"] for result in results] == [0.0, 1.0] * 3
    assert time.monotonic() - begin < 300


@linux
def test_the_time_of_all_tests_is_limited() -> None:
    truth = {"inputs": ["1 2\n"] * 10, "outputs": ["3\n"] * 10}
    begin = time.monotonic()

    result = built_in("code", {"time_limit_s": 1.0, "continuous": True})(
        prompt(truth), fenced(f"import time\ntime.sleep(0.4)\n{RIGHT_STDIN}")
    )

    assert result["passed"] <= 2  # 0.4 s each
    assert result["score"] == result["passed"] / 10
    assert time.monotonic() - begin < 60


@linux
def test_only_the_first_tests() -> None:
    truth = {"inputs": ["1 2\n", "2 2\n", "3 3\n"], "outputs": ["3\n", "4\n", "no\n"]}
    assert score(RIGHT_STDIN, truth, max_tests=2) == 1.0
    assert score(RIGHT_STDIN, truth) == 0.0
    assert score(RIGHT_STDIN, truth, continuous=True) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("block", "response", "code"),
    [
        ("last_python", "a\n```python\nx\n```\n```python\ny\n```\nz", "\ny\n"),
        ("last_python", "a\n```python\nx", "\nx"),  # never closed
        ("last_python", "print(1)", "print(1)"),
        ("last_python", "```\nx\n```", "```\nx\n```"),
        ("last", "```\nx\n```\n```py\ny\n```", "y\n"),
        ("last", "print(1)", None),
        ("first_def", "```\nx\n```\n```\ndef f(): 1\n```", "def f(): 1\n"),
        ("first_def", "```\nx\n```\n```\ny\n```", "x\n"),
        ("first_def", "<think>```\ndef a(): 1\n```</think>```\nx\n```", "x\n"),
        ("first_def", "<|begin_of_solution|>x", "x"),
        ("last", "```" * 50_000, None),
        ("last", "```\n" * 50_000, ""),
    ],
)
def test_where_the_code_is(block: Any, response: str, code: str | None) -> None:
    assert code_of(response, block) == code


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "same"),
    [
        ("3", "3\n", 0.0, True),
        ("  3  4 \n\n", "3 4", 0.0, True),
        ("3\n4", "3 4", 0.0, False),
        ("3.0", "3", 0.0, True),
        ("0.3333333", "0.33333333333", 1e-5, True),
        ("0.3333333", "0.33333333333", 0.0, False),
        ("3000000", "3000001", 1e-5, False),  # whole numbers are exact
        ("Yes", "YES", 1e-5, False),
        ("1e3", "1000", 0.0, True),
        ("1_000", "1000", 0.0, False),
        ("nan", "1.0", 1e-5, False),
        ("1e999", "1.0", 1e-5, False),
        ("9" * 5000, "9" * 5000, 0.0, True),
        ("٣", "3", 0.0, False),  # another script's digit
        ("", "", 0.0, True),
        ("x", "", 0.0, False),
    ],
)
def test_same_output(output: str, expected: str, tolerance: float, same: bool) -> None:
    assert same_output(output, expected, tolerance) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (True, 1, False),
        (0, False, False),
        (True, True, True),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
        (0.30000000000000004, 0.3, True),  # 0.1 + 0.2
        (1000000, 1000001, False),
        (10**400, 1.5, False),
        ([1, [2]], (1, (2,)), True),
        ([1], [1, 2], False),
        ([], {}, False),
        ({"1": 2}, {1: 2}, True),
        ({"a": 2}, {"b": 2}, False),
        ("a", "a", True),
    ],
)
def test_same_value(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected, 1e-5) is same


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (b"[1]", True), (b"null", True), (b"", False), (b"NaN", False), (b"-Infinity", False), (b"1 2", False),
        (b"[" * 100_000, False), (b"9" * 5000, False), (b"\xff", False), (b"truetrue", False),
    ],
)  # fmt: skip
def test_what_a_function_returned(result: bytes, found: bool) -> None:
    assert returned(result)[0] is found


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("no", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (None, "neither a mapping"),
        ({}, "no lists inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "same length"),
        ({"inputs": [], "outputs": []}, "holds no test"),
        ({**FUNCTION, "fn_name": "a b"}, "names the function 'a b'"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "is not JSON"),
        ({"inputs": [3], "outputs": [1], "fn_name": "f"}, "a list is expected"),
        ([{"assert_code": "assert f(1) == 2", "entry_point": "f"}], "they hold the expected answers"),
        ([{"a": 1}], "it has: a"),
    ],
)  # fmt: skip
def test_references_that_hold_no_tests(truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases_of(truth, "auto")


def test_the_form_can_be_chosen() -> None:
    assert cases_of({**STDIN, "fn_name": "add"}, "stdin")[0].stdin == "1 2\n"
    assert cases_of({"inputs": [["1", "2"]], "outputs": [["3"]]}, "auto")[0].stdin == "1\n2"
    with pytest.raises(ValueError, match="names the function None"):
        cases_of(STDIN, "function")


@linux
def test_a_broken_reference_is_invalid_and_never_0() -> None:
    scorer = load_rewards(RewardConfig(terms=[{"name": "by_data_source"}]))
    outcome = scorer.score_response(prompt("no", "codecontests"), fenced(RIGHT_STDIN))
    assert isinstance(outcome, Invalid)
    assert "the ground truth is not JSON" in outcome.detail


@linux
@pytest.mark.parametrize(
    ("source", "response", "truth", "value"),
    [
        *(
            (source, fenced("print(3)"), json.dumps(STDIN), 0.5)
            for source in ("codecontests", "apps", "codeforces", "taco")
        ),
        # verl scores by the first ten tests: a program that fails later has 1
        ("apps", fenced("x = int(input())\nprint(x if x < 10 else 0)"),
         {"inputs": [str(n) for n in range(12)], "outputs": [str(n) for n in range(12)]}, 1.0),
        ("lcb", fenced(RIGHT_STDIN), [{"input": "1 2", "output": "3", "testtype": "stdin"}], 1.0),
        ("lcb", "print(3)", [{"input": "1 2", "output": "3", "testtype": "stdin"}], 0.0),  # no block
    ],
)  # fmt: skip
def test_data_sources_with_code(source: str, response: str, truth: Any, value: float) -> None:
    outcome = load_rewards(RewardConfig(terms=[{"name": "by_data_source"}])).score_response(
        prompt(truth, source), response
    )
    assert isinstance(outcome, Reward), outcome
    assert outcome.value == value


def test_without_a_box_code_is_refused_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    none = layers.Layers(tuple(layers.Layer(name, False, "not offered") for name in WALLS))
    monkeypatch.setattr(layers, "probe", lambda: none)
    config = RewardConfig(terms=[{"name": "code"}, {"name": "by_data_source"}])

    problems = [*check_rewards(config), *check_data_sources(config, {"apps": "a.parquet", "math": "b.parquet"})]

    assert [problem.field for problem in problems] == ["reward.terms.0.name", "reward.terms.1.name"]
    assert "this machine cannot box it in: nothing keeps it from files of the host" in problems[0].what
    assert "landlock: not offered" in problems[0].what
    assert "reward.allow_unboxed_code=true" in problems[0].fix

    allowed = config.model_copy(update={"allow_unboxed_code": True})
    assert check_rewards(allowed) == []
    assert check_data_sources(allowed, {"apps": "a.parquet"}) == []
    if sys.platform == "linux":
        outcome = load_rewards(allowed).terms[0].reward(prompt(STDIN), fenced(RIGHT_STDIN))
        assert outcome["score"] == 1.0


@linux
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "stdout"}, "form is 'stdout'"),
        ({"block": "any"}, "block is 'any'"),
        ({"timeout_s": 0}, "timeout_s is 0; use more than 0"),
        ({"max_tests": 0}, "max_tests is 0; use more than 0"),
        ({"tolerance": -1}, "tolerance is -1"),
        ({"run_wide": None}, "code has no option called 'run_wide'"),
        ({"time_limit_s": 10.0}, "time_limit_s lets programs run for 10 s, and scoring a response may take 10 s"),
        (
            {"timeout_s": 9},
            "timeout_s gives one test 9 s, and all tests of a response have 8 s (80 % of reward.timeout_s=10)",
        ),
        (
            {"timeout_s": 3, "time_limit_s": 2.5},
            "3 s, and all tests of a response have 2.5 s; use at most timeout_s=2.5",
        ),
        ({"memory_mib": 2048}, "a program take 2048 MiB, and scoring a response may take 2048 MiB (reward.memory_gib)"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rewards(RewardConfig(terms=[{"name": "code", "options": options}]))
    assert message in str(caught.value)


@linux
@pytest.mark.parametrize(
    ("reward", "options", "timeout_s", "total_s", "mib"),
    [
        ({}, {}, 5, 8, 1024),
        ({"timeout_s": 5.0, "memory_gib": 1.0}, {}, 4, 4, 512),  # 80 % of 5; half of 1024
        ({"timeout_s": 5.0}, {"time_limit_s": 2.0}, 2, 2, 1024),
        ({}, {"timeout_s": 8.0, "memory_mib": 2047}, 8, 8, 2047),
    ],
)
def test_limits_that_are_not_given_fit_into_those_of_the_run(
    reward: dict[str, Any], options: dict[str, Any], timeout_s: float, total_s: float, mib: int
) -> None:
    [term] = load_rewards(RewardConfig(terms=[{"name": "code", "options": options}], **reward)).terms
    given = term.reward.keywords  # type: ignore[union-attr]
    assert (given["limits"].timeout_s, given["time_limit_s"]) == (timeout_s, total_s)
    assert given["limits"].memory_bytes == mib << 20


@linux
@pytest.mark.parametrize(
    ("name", "source", "value"),
    [(None, RIGHT_STDIN, 1.0), ("None", RIGHT_STDIN, 1.0), ("add", RIGHT_FUNCTION, 1.0), ("add", RIGHT_STDIN, 0.0)],
)
def test_tests_and_the_function_in_columns_of_their_own(name: str | None, source: str, value: float) -> None:
    """ROLL's rows: inputs of a function are one JSON value per line."""
    given = "1 2" if name in (None, "None") else "1\n2"
    row = prompt("reference of another kind", tests=json.dumps([{"stdin": given, "expected_stdout": "3"}]), name=name)
    reward = built_in("code", {"tests_in": "tests", "function_in": "name"})
    assert reward(row, fenced(source))["score"] == value  # type: ignore[index]
    with pytest.raises(ValueError, match="extra_info has no 'tests', which is to hold the tests"):
        reward(prompt("x"), fenced(source))


@pytest.mark.slow
@linux
def test_a_program_that_computes_on_all_cores_is_wrong_and_not_without_a_score() -> None:
    """Twelve tests take up to 1 s of processor time each, within 4 s: 8 s of it on two cores. Scoring may take 6 s, and has 2 s
    of wall time for the boxes' own starts."""
    source = """
import hashlib, threading
block = bytes(1 << 24)
def burn():
    while True: hashlib.sha256(block)
for _ in range(3): threading.Thread(target=burn).start()
burn()"""
    truth = json.dumps({"inputs": ["1"] * 12, "outputs": ["2"] * 12})
    terms = [{"name": "code", "options": {"continuous": True, "timeout_s": 0.7, "time_limit_s": 4.0}}]
    scorer = ScorerInWorkers(RewardConfig(terms=terms, workers=1, timeout_s=6.0, memory_gib=1.0))
    try:
        [[outcome]] = scorer.score([group_of(prompt(truth), fenced(source))])
    finally:
        scorer.close()
    assert isinstance(outcome, Reward) and outcome.value == 0.0


def group_of(row: Prompt, *responses: str) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt=row,
        trajectories=tuple(
            Trajectory(
                sample_id=f"a/{number}",
                token_ids=(1,),
                logprobs=(0.0,),
                text=text,
                stop_reason=StopReason.EOS,
                policy_version=0,
            )
            for number, text in enumerate(responses)
        ),
    )


@pytest.fixture
def databases(tmp_path: Path) -> Path:
    folder = tmp_path / "spider/database/shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("create table item (name text, price real, picture blob)")
        database.executemany("insert into item values (?, ?, ?)", [("a", 1.5, b"\0"), ("b", 2, None), ("b", 2, None)])
    database.close()
    return tmp_path


@linux
@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>so</think><solution>select name from item order by 1 desc</solution>", 1.0),  # a set of rows
        ("<think>so</think><solution>select name from item where price > 1</solution>", 1.0),
        ("<think>so</think><solution>select name from item where price > 2</solution>", 0.0),
        ("<think>so</think><solution>select nam from item</solution>", 0.0),
        ("<think>so</think><solution>drop table item</solution>", 0.0),
        ("<think>so</think><solution>attach '/etc/passwd' as p</solution>", 0.0),
        ("<think>so</think><solution>with recursive n(i) as (select 1 union all select i from n) select * from n</solution>",
         0.0),
        ("<solution>select name from item</solution>", -1.0),
        ("<think>so</think><solution>a</solution><solution>select name from item</solution>", -1.0),
        ("<think>so</think><sql>x</sql><observation>y</observation>no<solution>select name from item</solution>", -1.0),
        ("<think>so</think><observation>y</observation>\n<think>z</think><solution>select name from item</solution>", 1.0),
        ("<think>so</think><solution><sql>select name from item</sql></solution>", -1.0),
        ("<think>so</think><solution>select name from item <Sql></solution>", -1.0),
        ("<think>so</think><OBSERVATION>y</OBSERVATION>no<solution>select name from item</solution>", -1.0),
        ("<think>so</think><solution>select name from item</solution><observation>y</observation>", 1.0),
        ("<think>so</think></solution><solution>select name from item</solution>", 1.0),
        ("<Think>so</Think><solution>select name from item</solution>", -1.0),
        ("<think>so</think><Solution>select name from item</Solution>", -1.0),
        ("select name from item", -1.0),
    ],
)  # fmt: skip
def test_text2sql(databases: Path, response: str, value: float) -> None:
    reward = built_in("text2sql", {"db_path": str(databases), "timeout_s": 1.0})
    row = prompt("select name from item", "text2sql", db_id="shop", data="spider")

    assert reward(row, response) == value
    assert (databases / "spider/database/shop").iterdir().__next__().name == "shop.sqlite"  # nothing beside it


@linux
def test_text2sql_compares_bytes_and_nothing(databases: Path) -> None:
    reward = built_in("text2sql", {"db_path": str(databases)})
    row = prompt("select picture from item", "text2sql", db_id="shop", data="spider")
    assert reward(row, "<think>.</think><solution>select distinct picture from item</solution>") == 1.0
    assert reward(row, "<think>.</think><solution>select hex(picture) from item</solution>") == 0.0


@linux
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (prompt("select x from item", db_id="shop", data="spider"), "the reference's query fails: .*no such column: x"),
        (prompt("select 1", db_id="../shop", data="spider"), "db_id '../shop'"),
        (prompt("select 1", db_id="shop", data="mine"), "data 'mine'"),
        (prompt("select 1", db_id="cafe", data="spider"), "there is no database"),
        (prompt(None, db_id="shop", data="spider"), "needs a query"),
    ],
)
def test_text2sql_rows_that_cannot_be_scored(databases: Path, row: Prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built_in("text2sql", {"db_path": str(databases)})(row, "<think>.</think><solution>select 1</solution>")


@linux
def test_time_for_queries_is_a_part_of_the_time_for_scoring(databases: Path) -> None:
    def limit(timeout_s: float) -> float:
        options = {"db_path": str(databases)}
        config = RewardConfig(terms=[{"name": "text2sql", "options": options}], timeout_s=timeout_s)
        return load_rewards(config).terms[0].reward.keywords["limits"].timeout_s

    assert [limit(10.0), limit(1000.0)] == [4.0, 30.0]  # 40 % of 10; SkyRL's 30
    with pytest.raises(ConfigError, match="timeout_s lets programs run for 10 s"):
        built_in("text2sql", {"db_path": str(databases), "timeout_s": 5.0})


def test_text2sql_needs_its_databases() -> None:
    problems = check_data_sources(RewardConfig(terms=[{"name": "by_data_source"}]), {"text2sql": "a.parquet"})
    assert "text2sql needs db_path, the folder of its databases" in problems[0].what
