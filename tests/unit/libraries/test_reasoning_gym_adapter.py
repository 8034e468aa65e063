from __future__ import annotations

import contextlib
import importlib.util
import io
import sys

import pytest

from posttrain.errors import ConfigError, MissingDependency
from posttrain.libraries import reasoning_gym as library

# Texts that verifiers which evaluate answers are known to evaluate.
TRAPS = ["[[1, 2], [3, 4]]", "['a', 'b']", "1+1", "x**2 + y", "(1, 2)", "print(1)", "5", "0b101", "{'a': 1}"]


@pytest.fixture(scope="module")
def tasks() -> dict[str, tuple[object, dict]]:
    """A generator and its first entry, of every task that this machine can make (zebra_puzzles needs a compiled pycosat)."""
    made = {}
    for task in library.task_names():
        generator = library.generator(task, seed=1, size=3, options={})
        if task == "zebra_puzzles" and importlib.util.find_spec("pycosat").loader is None:  # the stand-in
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            made[task] = (generator, generator[0])
    return made


@pytest.mark.slow
def test_every_entry_survives_as_text_and_scores_the_same(tasks):
    assert len(tasks) >= 100
    for task, (generator, entry) in tasks.items():
        back = library.entry_from_text(library.entry_to_text(entry))
        assert back == entry, task
        assert generator.score_answer(entry["answer"], back) == generator.score_answer(entry["answer"], entry), task


def test_tuples_and_integer_keys_survive_in_text():
    entry = {"question": "q", "answer": "a", "metadata": {"pair": (1, (2, [3])), "edges": {0: "x", 1: "y"}}}

    assert library.entry_from_text(library.entry_to_text(entry)) == entry
    with pytest.raises(ValueError, match="not a reasoning-gym entry"):
        library.entry_from_text('{"question": "q"}')


_seen: list[str] = []
_watching = False


def _watch(event: str, _arguments: tuple) -> None:
    if _watching and event == "exec":
        _seen.append(event)


def test_the_list_of_evaluating_tasks_is_what_the_verifiers_do(tasks):
    """Python tells of every eval and exec through an audit hook; a verifier that runs one must be on the list."""
    global _watching
    sys.addaudithook(_watch)
    evaluating = set()
    for task, (generator, entry) in tasks.items():
        for turn in range(2):  # the first turn lets the verifier import what it needs, which is an exec too
            for answer in [entry["answer"], *TRAPS]:
                _seen.clear()
                _watching = turn == 1
                with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
                    generator.score_answer(answer, entry)
                _watching = False
                if _seen:
                    evaluating.add(task)
    assert evaluating == library.EVALUATING_TASKS


def test_tasks_that_evaluate_are_refused():
    with pytest.raises(ConfigError, match="verifier of countdown passes text to Python's eval"):
        library.check_scorable("countdown")
    with pytest.raises(ConfigError, match="countdown"):
        library.verify("countdown", "{}", "1+1", {"question": "q", "answer": "a"})
    library.check_scorable("chain_sum")


def test_wrong_task_and_options_offer_the_right_ones():
    with pytest.raises(ConfigError, match=r"no task called 'chainsum'; did you mean chain_sum"):
        library.generator("chainsum", seed=1, size=1, options={})
    with pytest.raises(ConfigError, match="no task called 'composite'"):
        library.generator("composite", seed=1, size=1, options={})
    with pytest.raises(ConfigError) as caught:
        library.generator("chain_sum", seed=1, size=1, options={"max_term": 3, "seed": 4})
    assert [problem.fix for problem in caught.value.problems] == [
        "did you mean max_terms?",
        "seed and the number of rows have settings of their own",
    ]
    assert "known: min_terms, max_terms, min_digits, max_digits, allow_negation" in caught.value.problems[0].what
    with pytest.raises(ConfigError, match="max_terms must be >= min_terms"):
        library.generator("chain_sum", seed=1, size=1, options={"min_terms": 5, "max_terms": 2})


def test_entries_of_neighbouring_seeds_differ():
    def questions(seed: int) -> list[str]:
        stream = library.entries("chain_sum", seed=seed, options={"min_digits": 4})
        return [next(stream)["question"] for _ in range(20)]

    assert questions(1) == questions(1)
    assert not set(questions(1)) & set(questions(2))


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)

    with pytest.raises(MissingDependency, match=r"reasoning_gym is not installed \(needed by reward x\); pip install"):
        library.check_installed("reward x")


def test_pycosat_gets_a_stand_in_only_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycosat", None)  # restored afterwards, whatever is put there meanwhile
    monkeypatch.delitem(sys.modules, "pycosat")
    monkeypatch.setattr(library, "find_spec", lambda name: None)

    library._stand_in_for_pycosat()

    stand_in = sys.modules["pycosat"]
    assert importlib.util.find_spec("pycosat") is stand_in.__spec__
    assert not hasattr(stand_in, "__file__")  # libraries that look through all modules find nothing odd
    with pytest.raises(MissingDependency, match=r"pycosat is not installed .*zebra_puzzles"):
        stand_in.itersolve([[1]])

    real = object()
    monkeypatch.setitem(sys.modules, "pycosat", real)
    monkeypatch.setattr(library, "find_spec", lambda name: object())
    library._stand_in_for_pycosat()
    assert sys.modules["pycosat"] is real
