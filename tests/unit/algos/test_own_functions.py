"""Functions of the user's own that fail: one error with their file, line and name, and the shape that is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import ConfigError, RequestError
from posttrain.records.notices import FROM_OWN_FUNCTIONS
from posttrain.registry import ADVANTAGES, DIVERGENCES, POLICY_LOSSES, TUNE_METHODS, Registry

LOGPROBS, MASK = torch.full((2, 3), -1.0), torch.tensor([[True, True, False], [True, False, False]])
LOSS_INPUTS = {"policy_logprobs": LOGPROBS, "advantages": torch.ones(2, 3), "mask": MASK}
ESTIMATOR_INPUTS = {"rewards": torch.tensor([1.0, 0.0]), "valid": torch.tensor([True, True]), "response_mask": MASK}
PAIRS = {"chosen_logps": torch.zeros(2), "rejected_logps": torch.zeros(2)}
Call = Callable[..., Any]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Call ``mine`` of a file with these lines behind its first, ``import torch``."""

    def run(registry: Registry[Any], inputs: dict[str, Any], *lines: str, takes: str = "") -> Any:
        file = tmp_path / "mine.py"
        file.write_text(
            "\n".join(["import torch", f"def mine({takes or ', '.join(inputs)}):", *(f"    {each}" for each in lines)])
        )
        function = registry.get("mine", str(file))
        names = registry.describe("mine", str(file)).inputs
        return function(*(inputs[name] for name in names))

    return run


@pytest.fixture
def error(call: Call, tmp_path: Path) -> Call:
    """The one problem of such a call, without the folder of its file."""

    def run(*arguments: Any, **more: Any) -> str:
        with pytest.raises(RequestError) as raised:
            call(*arguments, **more)
        [problem] = raised.value.problems
        assert problem.field.endswith(".name")
        return str(problem).replace(f"{tmp_path}/", "")

    return run


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return rato, {}", "mine.py:3: the policy loss mine failed: NameError: name 'rato' is not defined"),
        ("return policy_logprobs @ advantages, {}", "mine.py:3: the policy loss mine failed: RuntimeError"),
        ("return (-advantages * policy_logprobs).mean(), {}", "mine.py:2: the policy loss mine returned one number"),
        ("return (-advantages * policy_logprobs).sum(dim=1), {}", "[2], and a loss is a number per token, [2, 3]"),
        ("return -advantages * policy_logprobs, {'seen': mask.sum(dim=1)}", "a tensor of shape [2] to log as 'seen'"),
        ("return -advantages * policy_logprobs, {'seen': 'all'}", "'all' to log as 'seen'"),
        ("return -advantages * policy_logprobs, 0.5", "mine.py:2: the policy loss mine returned (a tensor of shape [2, 3], 0.5)"),
        ("raise SystemExit(3)", "mine.py:3: the policy loss mine failed: SystemExit: 3"),
        ("pass", "mine.py:2: the policy loss mine returned None"),
    ],
)  # fmt: skip
def test_a_loss_that_fails_is_named(error: Call, line: str, said: str) -> None:
    assert said in error(POLICY_LOSSES, LOSS_INPUTS, line)


def test_what_a_failing_function_was_called_with_is_said(error: Call) -> None:
    text = error(POLICY_LOSSES, LOSS_INPUTS, "return policy_logprobs @ advantages, {}")
    assert "it was called with policy_logprobs [2, 3], advantages [2, 3], mask [2, 3]" in text


def test_a_function_without_named_inputs_is_told_how_they_are_found(error: Call) -> None:
    assert "its parameters are its inputs, by their names" in error(
        POLICY_LOSSES, {}, "return args[0], {}", takes="*args"
    )


def test_a_file_that_cannot_be_imported_is_placed_at_its_key(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("import no_such_library\ndef mine(policy_logprobs): ...\n")
    with pytest.raises(ConfigError) as raised:
        POLICY_LOSSES.get("mine", str(file))
    assert [(each.field, "mine.py:1: importing the file failed" in each.what) for each in raised.value.problems] == [
        ("loss.path", True)
    ]


def test_a_loss_may_return_no_report_and_log_numbers(call: Call) -> None:
    loss, report = call(POLICY_LOSSES, LOSS_INPUTS, "return -advantages * policy_logprobs")
    assert loss.tolist() == [[1.0] * 3] * 2 and report == {}
    _, report = call(POLICY_LOSSES, LOSS_INPUTS, "return -advantages, {'one': 0.5, 'mean': advantages.mean()}")
    assert report["one"].tolist() == [[0.5] * 3] * 2 and report["mean"].shape == (2, 3)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["return rewards"], "mine.py:2: the advantage estimator mine returned a tensor of shape [2]"),
        (["return rewards.mean()"], "returned one number (a tensor of shape [])"),
        (["return [rewards]"], "mine.py:2: the advantage estimator mine returned list"),
        (["rewards[5]", "return rewards"], "mine.py:3: the advantage estimator mine failed: IndexError"),
        (["return response_mask.float(), rewards"], "a tensor of shape [2], and there is an advantage for every token"),
    ],
)
def test_an_estimator_that_fails_is_named(error: Call, lines: list[str], said: str) -> None:
    assert said in error(ADVANTAGES, ESTIMATOR_INPUTS, *lines)


def test_an_estimator_without_tokens_is_told_to_take_them(error: Call) -> None:
    assert "take response_mask" in error(ADVANTAGES, {"rewards": torch.ones(2)}, "return rewards[:, None]")


def test_divergences_and_tuning_methods_are_checked_alike(error: Call, call: Call) -> None:
    tokens = {"policy_logprobs": LOGPROBS, "teacher_logprobs": LOGPROBS, "mask": MASK}
    assert "a divergence is a tensor [2, 3]" in error(DIVERGENCES, tokens, "return teacher_logprobs.sum()")
    wide = {"student_logprobs": LOGPROBS, "teacher_logprobs": LOGPROBS}
    assert "a divergence is a tensor [2]" in error(DIVERGENCES, wide, "return student_logprobs - teacher_logprobs")
    assert call(DIVERGENCES, wide, "return (student_logprobs - teacher_logprobs).sum(dim=-1)").tolist() == [0, 0]
    reported = "{'rewards/chosen': chosen_logps, 'rewards/rejected': rejected_logps}"
    assert "there are 2 pairs or rows" in error(TUNE_METHODS, PAIRS, f"return chosen_logps.sum(), {reported}")
    assert "no rewards/chosen and no rewards/rejected to log" in error(TUNE_METHODS, PAIRS, "return chosen_logps, {}")
    assert "mine.py:3: the tuning method mine failed: ZeroDivisionError" in error(TUNE_METHODS, PAIRS, "return 1 / 0")
    assert len(call(TUNE_METHODS, PAIRS, f"return chosen_logps, {reported}")) == 2


def test_memory_that_is_full_is_no_fault_of_the_function(call: Call) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        call(POLICY_LOSSES, LOSS_INPUTS, "raise torch.OutOfMemoryError('8 GiB')")


def test_values_that_are_not_finite_are_noticed_within_the_mask(call: Call, tmp_path: Path) -> None:
    FROM_OWN_FUNCTIONS.take()
    behind_mask = "return torch.where(mask, policy_logprobs, torch.nan), {}"
    call(POLICY_LOSSES, LOSS_INPUTS, behind_mask)
    assert FROM_OWN_FUNCTIONS.take() == []
    for _ in range(2):
        call(POLICY_LOSSES, LOSS_INPUTS, "return policy_logprobs.sqrt(), {}")
    [text] = FROM_OWN_FUNCTIONS.take()
    assert (
        text
        == f"{tmp_path}/mine.py:2: the policy loss mine returned nan for 3 of 3 tokens, and all of its inputs are finite"
    )
    not_its_own = {**LOSS_INPUTS, "advantages": torch.full((2, 3), torch.nan)}
    call(POLICY_LOSSES, not_its_own, "return policy_logprobs * advantages, {}")
    assert FROM_OWN_FUNCTIONS.take() == []
    # The second response has no valid reward, and enters no loss
    partly = {**ESTIMATOR_INPUTS, "valid": torch.tensor([True, False])}
    call(ADVANTAGES, partly, "return torch.where(response_mask, (1 / rewards)[:, None], 0.0)")
    assert FROM_OWN_FUNCTIONS.take() == []
    call(ADVANTAGES, ESTIMATOR_INPUTS, "return torch.where(response_mask, (1 / rewards)[:, None], 0.0)")
    [text] = FROM_OWN_FUNCTIONS.take()
    assert "the advantage estimator mine returned inf for 1 of 3 tokens" in text
