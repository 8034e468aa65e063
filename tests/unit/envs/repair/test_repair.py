"""Repair of a repository: tasks, tools, the verdict, and edits that try to get around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.episodes import FIRST_TRAINING_SEED
from posttrain.envs.repair import made, repair
from posttrain.envs.repair.checkout import TESTS, Box, rendered_tests
from posttrain.envs.repair.mutations import KINDS, bugs_of, plainly
from posttrain.envs.repair.tasks import Case
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec, EnvStep
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.walls import BoxLimits

WRONG = "def total(prices):\n    return sum(prices) - 1\n"
CASES = [
    {"call": "shop.cart:total", "arguments": [[1, 2]], "result": 3},
    {"call": "shop.cart:total", "arguments": [[]], "result": 0},
    {"call": "shop.cart:total", "arguments": [["a"]], "error": "TypeError"},
]
HIDDEN = [{"call": "shop.cart:total", "arguments": [[5, 5]], "result": 10}]


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    task = {"name": "cart", "files": {"shop/cart.py": WRONG}, "tests": CASES, "hidden": HIDDEN}
    file.write_text(json.dumps(task) + "\n")
    return str(file)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def begun(tasks: str, **settings: Any) -> Any:
    env: Any = repair(EnvSpec(name="repair"), tasks=tasks, **settings)
    env.reset(0)
    return env


def said(step: EnvStep) -> str:
    return "\n".join(str(message["content"]) for message in step.messages)


def test_a_task_is_shown_read_mended_and_judged(own: str) -> None:
    env = repair(EnvSpec(name="repair"), tasks=own, call_reward=0.25)
    start = env.reset(0)
    shown = str(start.messages[0]["content"])  # type: ignore[union-attr]
    assert "FAILED test_1: total([1, 2]) returned 2, expected 3" in shown and "2 of 3 tests fail" in shown
    assert [tool["function"]["name"] for tool in start.tools] == [  # type: ignore[union-attr]
        "list_files", "read_file", "edit_file", "write_file", "run_tests",
    ]  # fmt: skip
    assert said(env.step(call("list_files"))) == f"shop/cart.py\n{TESTS}"  # type: ignore[arg-type]
    step: Any = env.step(call("read_file", path="shop/cart.py"))
    assert step.reward == 0.25 and "   2      return sum(prices) - 1" in said(step)
    assert "assert total([1, 2]) == 3" in said(env.step(call("read_file", path=TESTS)))  # type: ignore[arg-type]
    env.step(call("edit_file", path="shop/cart.py", old=" - 1", new=""))
    assert said(env.step(call("run_tests"))) == "all tests pass"  # type: ignore[arg-type]
    step = env.step("Done.")
    assert (step.reward, step.done, step.stop) == (1.0, True, "solved")
    told = env.close()
    assert (told["success"], told["tests_passed"], told["edits"], told["test_runs"]) == (1.0, 1.0, 1.0, 1.0)


def test_the_last_turn_counts_and_answers_that_know_only_the_tests_do_not(own: str) -> None:
    env = begun(own, max_turns=1)
    step = env.step(call("edit_file", path="shop/cart.py", old=" - 1", new=""))
    assert (step.reward, step.stop) == (1.0, "solved")
    learned = "def total(prices):\n    return {3: 3, 0: 0}[sum(prices)]\n"  # of the tests that can be read
    env = begun(own, share_reward=True)
    assert said(env.step(call("write_file", path="shop/cart.py", text=learned))).endswith("(2 lines)")
    assert said(env.step(call("run_tests"))) == "all tests pass"
    step = env.step("Done.")
    # 1 of 4 tests passed before, 3 of 4 do now: two of the three that failed
    assert (step.stop, step.reward) == ("lost", pytest.approx(2 / 3)) and env.close()["success"] == 0.0


HOSTILE = {
    "leaves": "import os\nos._exit(0)\n",
    "writes a result": "import os\nos.write(3, b'[{\"value\": 3}]')\nos._exit(0)\n",
    "replaces the runner": (
        "import sys, json\njson.dumps = lambda *a, **k: '[]'\n"
        "sys.modules['solution'].run_calls = lambda *a: []\ndef total(prices):\n    return 3\n"
    ),
    "equals everything": (
        "class Any:\n    def __eq__(self, other):\n        return True\ndef total(prices):\n    return Any()\n"
    ),
    "never ends": "while True:\n    pass\n",
    "closes the result": "import os\nos.close(3)\ndef total(prices):\n    return sum(prices)\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_wins_nothing(own: str, name: str) -> None:
    env = begun(own, timeout_s=1.0)
    env.step(call("write_file", path="shop/cart.py", text=HOSTILE[name]))
    step = env.step("Done.")
    assert step.done and step.reward == 0.0 and env.close()["success"] == 0.0


def test_code_in_the_repository_sees_neither_this_machine_nor_what_is_expected(own: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    spy = (
        "import gc, os, socket\n"
        "def total(prices):\n"
        "    found = []\n"
        f"    for what in (lambda: open({str(secret)!r}), lambda: open({str(tmp_path / 'made')!r}, 'w'), os.fork,\n"
        "                 lambda: socket.create_connection(('127.0.0.1', 22), 1), lambda: open('/etc/passwd')):\n"
        "        try:\n            what()\n            found.append('open')\n"
        "        except BaseException as error:\n            found.append(type(error).__name__)\n"
        "    texts = [o for o in gc.get_objects() if isinstance(o, dict) and ('result' in o or 'expected' in o)]\n"
        "    return [found, len([t for t in texts if t.get('result') in (3, 10)])]\n"
    )
    env = begun(own)
    env.step(call("write_file", path="shop/cart.py", text=spy))
    text = said(env.step(call("run_tests")))
    assert "'open'" not in text.split("expected")[0] and ", 0]" in text, text
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"path": TESTS, "text": ""}, "the tests cannot be changed"),
        ({"path": "tests/conftest.py", "text": ""}, "the tests cannot be changed"),
        ({"path": "../outside.py", "text": ""}, "no path in the repository"),
        ({"path": "/etc/passwd", "text": ""}, "no path in the repository"),
        ({"path": "a/./b.py", "text": ""}, "no path in the repository"),
        ({"path": "a\n.py", "text": ""}, "no path in the repository"),
        ({"path": "big.py", "text": "x" * 70_000}, "at most 64 files of 65536 characters"),
    ],
)
def test_files_outside_of_the_repository_cannot_be_written(own: str, arguments: dict[str, str], answer: str) -> None:
    env = begun(own)
    assert answer in said(env.step(call("write_file", **arguments)))


def test_what_cannot_be_edited_is_said(own: str) -> None:
    env = begun(own)
    for arguments, answer in (
        ({"path": "shop/cart.py", "old": "x y", "new": ""}, "does not hold that text"),
        ({"path": "shop/cart.py", "old": "prices", "new": ""}, "holds that text 2 times"),
        ({"path": "shop/bag.py", "old": "a", "new": ""}, "there is no file 'shop/bag.py'"),
        ({"path": TESTS, "old": "== 3", "new": "== 2"}, "the tests cannot be changed"),
    ):
        assert answer in said(env.step(call("edit_file", **arguments)))
    env.step(call("write_file", path="shop/cart.py", text="def total(:\n"))
    assert (
        "SyntaxError: invalid syntax" in (text := said(env.step(call("run_tests")))) and "shop/cart.py, line 1" in text
    )


def test_a_template_without_tools_reads_them_in_the_first_message(own: str) -> None:
    start: Any = repair(EnvSpec(name="repair"), tasks=own, role="user").reset(0)
    text = start.messages[0]["content"]
    assert "edit_file(path, old, new): Replaces" in text and '<tool_call>{"name": "read_file"' in text
    assert start.tools == ()


def test_a_saved_episode_is_continued(own: str) -> None:
    env = begun(own)
    env.step(call("edit_file", path="shop/cart.py", old=" - 1", new=""))
    saved = json.loads(json.dumps(env.state()))
    again: Any = repair(EnvSpec(name="repair"), tasks=own)
    again.restore(saved)
    assert again.step("Done.") == env.step("Done.")
    assert again.close() == env.close()


def test_seeds_draw_tasks_and_validation_has_repositories_of_its_own() -> None:
    box = Box(BoxLimits(memory_bytes=512 << 20), tuple(walls_for("a test", allow_unboxed=False)))
    for seed, held_out in ((0, True), (FIRST_TRAINING_SEED, False)):
        task = made.drawn(seed, ("comparison", "operator"), box)
        assert task == made.drawn(seed, ("comparison", "operator"), box)
        assert (task.name.split("/")[0] in made.HELD_OUT) is held_out
        assert task.kind in ("comparison", "operator")
        assert not all(box.passed(task.files, task.tests))
        right = made.files_of(task.name.split("/")[0])
        assert all(box.passed(right, task.all)) and sum(right[path] != task.files[path] for path in right) == 1
        compile(rendered_tests(task.tests), "tests", "exec")


@pytest.mark.slow
def test_every_repository_has_tasks_of_several_kinds() -> None:
    """The tests of a right repository all pass, and find most of the bugs that it can have."""
    box = Box(BoxLimits(memory_bytes=512 << 20), tuple(walls_for("a test", allow_unboxed=False)))
    count = 0
    for name in made.names():
        places = made.places(name, KINDS)
        found = [task for number in range(len(places)) if (task := made.task_at(name, KINDS, number, box))]
        assert len(found) > 20 and len({task.kind for task in found}) >= 5, name
        assert all(box.passed(made.files_of(name), found[0].all)), name
        count += len(found)
    assert count > 500


def test_bugs_are_one_change_each() -> None:
    source = "def f(a, b):\n    if a < 2:\n        return b\n    return max(a, b)\n"
    found = bugs_of(source)
    assert ("comparison", plainly(source.replace("<", "<="))) in found
    assert ("boundary", plainly(source.replace("2", "3"))) in found and ("boundary", source.replace("2", "1")) in found
    assert ("function", source.replace("max", "min")) in found
    assert ("arguments", source.replace("(a, b)\n", "(b, a)\n")) in found
    assert ("missing", source.replace("a < 2", "False")) in found and len(found) == 6
    assert [kind for kind, _ in bugs_of(source, ["function"])] == ["function"]


def test_outcomes_are_compared_as_json() -> None:
    assert Case("m:f", (), [1, 2]).passed({"value": [1, 2]})
    assert not Case("m:f", (), True).passed({"value": 1}) and not Case("m:f", (), 1).passed({"value": 1.0})
    assert not Case("m:f", (), None).passed({"error": "TypeError"})
    assert Case("m:f", (), {"a": 1, "b": 2}).passed({"value": {"b": 2, "a": 1}})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"files": {}}, "row 0 of tasks.jsonl has no files"),
        ({"files": {"../x.py": ""}}, "'../x.py' is no path in the repository"),
        ({"tests": []}, "row 0 of tasks.jsonl has no tests"),
        ({"tests": [{"call": "total", "result": 1}]}, "test 0 calls 'total'"),
        ({"tests": [{"call": "a:b", "arguments": []}]}, "test 0 needs a result or an error"),
        ({"hidden": [{"call": "a:b", "arguments": {}, "result": 1}]}, "hidden, test 0: its arguments are no list"),
    ],
)
def test_rows_that_are_no_task_are_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"files": {"shop/cart.py": WRONG}, "tests": CASES} | change) + "\n")
    with pytest.raises(ConfigError, match=problem):
        repair(EnvSpec(name="repair"), tasks=str(file))


def test_settings_that_cannot_be_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"tasks": "nowhere.jsonl"},
        {"kinds": ["comparision"]},
        {"kinds": []},
        {"role": "system"},
    ]
    for settings in wrong:
        with pytest.raises(ConfigError):
            repair(EnvSpec(name="repair"), **settings)
