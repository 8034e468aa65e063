"""Programs with test cases, run in a sandbox; their output or return value is compared outside it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardFn
from posttrain.processes.proc import core_wait_s
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.code_tests import Block, Case, Form, cases_of, code_of, returned, same_output, same_value
from posttrain.rewards.options import OWN_SHARE, RunWide, check_choice, too_large, too_slow
from posttrain.sandbox.boxes import BoxRun, Program, run
from posttrain.sandbox.layers import walls_for
from posttrain.sandbox.walls import BoxLimits

# Defaults for one test and for one program, or the limits of the reward section where those are lower.
_TEST_S = 5.0
_MIB = 1024


@REWARDS.register("code", runs_code=True)
def code(
    *,
    form: Form = "auto",
    block: Block = "last_python",
    timeout_s: float | None = None,
    time_limit_s: float | None = None,
    memory_mib: int | None = None,
    max_tests: int | None = None,
    continuous: bool = False,
    tolerance: float = 1e-5,
    tests_in: str | None = None,
    function_in: str | None = None,
    run_wide: RunWide | None = None,
) -> RewardFn:
    """A reward of 1 when the program passes all tests, else 0; with ``continuous``, the share of tests passed.

    Args: ``form`` auto calls a function when the reference names one, else the program reads stdin and prints; ``block``
        selects the program in the response (``code_of``); ``timeout_s`` is the limit of one test (null: 5, or time_limit_s
        where that is less), ``time_limit_s`` of all tests of a response: tests not begun by then count as failed (null:
        80 % of reward.timeout_s); ``memory_mib`` of address space (null: 1024, or half of reward.memory_gib where that is
        less); ``max_tests`` runs only the first tests; ``tolerance`` is relative, for numbers with decimals; ``tests_in`` and
        ``function_in`` are keys of extra_info that hold the tests, in place of the reference, and the name of a function.
    Raises: ConfigError for invalid options, options that contradict the run's, and a machine without a sandbox.
    """
    check_choice("form", form, Form)
    check_choice("block", block, Block)
    run_wide = run_wide or RunWide()
    least = {"timeout_s": timeout_s, "time_limit_s": time_limit_s, "max_tests": max_tests, "memory_mib": memory_mib}
    problems = [
        Problem(f"{name} is {value}; use more than 0", field=f"options.{name}")
        for name, value in least.items()
        if value is not None and value <= 0
    ]
    if tolerance < 0:
        problems.append(Problem(f"tolerance is {tolerance}; use at least 0", field="options.tolerance"))
    problems += too_slow("time_limit_s", time_limit_s or 0.0, run_wide)
    problems += too_large("memory_mib", memory_mib or 0, run_wide)
    total_s = time_limit_s or OWN_SHARE * run_wide.timeout_s
    if timeout_s is not None and timeout_s > total_s:
        what = f"timeout_s gives one test {timeout_s:g} s, and all tests of a response have {total_s:g} s"
        why = "" if time_limit_s else f" (80 % of reward.timeout_s={run_wide.timeout_s:g})"
        fix = f"use at most timeout_s={total_s:g}, or a longer {'time_limit_s' if time_limit_s else 'reward.timeout_s'}"
        problems.append(Problem(what + why, fix=fix, field="options.timeout_s"))
    if problems:
        raise ConfigError(problems)
    most_mib = min(_MIB, int(run_wide.memory_gib * 512))
    limits = BoxLimits(timeout_s=timeout_s or min(_TEST_S, total_s), memory_bytes=(memory_mib or most_mib) << 20)
    return partial(
        _score,
        form=form,
        block=block,
        limits=limits,
        time_limit_s=total_s,
        max_tests=max_tests,
        continuous=continuous,
        tolerance=tolerance,
        tests_in=tests_in,
        function_in=function_in,
        walls=walls_for("the reward code", allow_unboxed=run_wide.allow_unboxed_code),
    )


def _score(
    prompt: Prompt,
    response: str,
    *,
    form: Form,
    block: Block,
    limits: BoxLimits,
    time_limit_s: float,
    max_tests: int | None,
    continuous: bool,
    tolerance: float,
    tests_in: str | None,
    function_in: str | None,
    walls: Sequence[str],
) -> Mapping[str, float]:
    """Raises: ValueError when the reference holds no tests; BoxError when a sandbox cannot be created."""
    cases = cases_of(*_tests(prompt, form, tests_in, function_in))[:max_tests]
    source = code_of(response, block)
    passed = 0
    if source is not None and source.strip():
        # Time for which a program or this process waited for a core does not count: a busy machine changes no verdict.
        end = time.monotonic() + time_limit_s - core_wait_s()
        for case in cases:
            left = end + core_wait_s() - time.monotonic()
            if left <= 0:
                break
            done = run(_program(source, case), replace(limits, timeout_s=min(limits.timeout_s, left)), walls)
            end += done.waited_s
            if passes(done, case, tolerance):
                passed += 1
            elif not continuous:
                break
    share = passed / len(cases)
    return {"score": share if continuous else float(passed == len(cases)), "passed": passed, "tests": len(cases)}


def _tests(
    prompt: Prompt, form: Form, tests_in: str | None, function_in: str | None
) -> tuple[object, Form, str | None]:
    """Return the tests, their form, and the name of the function. Raises: ValueError."""
    tests: object = prompt.ground_truth
    if tests_in is not None:
        if tests_in not in prompt.extra_info:
            raise ValueError(f"extra_info has no {tests_in!r}, which is to hold the tests (data.extra_columns)")
        tests = prompt.extra_info[tests_in]
    name = prompt.extra_info.get(function_in) if function_in is not None else None
    # ROLL's files write "None" for a test without a function.
    return tests, form, str(name) if name not in (None, "", "None") else None


def _program(source: str, case: Case) -> Program:
    """Build the sandboxed program: its source and input, never the expected output."""
    return Program(source=source, stdin=case.stdin, function=case.function, arguments=case.arguments)


def passes(done: BoxRun, case: Case, tolerance: float) -> bool:
    """Return True when a run ended by itself, without an error, and gave the expected result."""
    if not done.finished:
        return False
    if case.function is None:
        return same_output(done.stdout.decode(errors="replace"), case.expected, tolerance)
    found, value = returned(done.result)
    if not found:
        return False
    expected = case.expected
    # Some datasets wrap the expected value in a list.
    wrapped = isinstance(expected, (list, tuple)) and len(expected) == 1
    return same_value(value, expected, tolerance) or (wrapped and same_value(value, expected[0], tolerance))
