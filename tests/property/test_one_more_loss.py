"""A new loss is one new file: every property test and the test of the document find it, and pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOSS = '''"""The policy gradient with a weight that falls as the policy leaves the one that sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algos.ratio import distance_report, log_ratio
from posttrain.registry import POLICY_LOSSES
from posttrain.settings import Positive


@POLICY_LOSSES.register("near_policy")
def near_policy(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, width: Positive, steep: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A w log pi per token, with w = exp(-(policy - old)^2 / width), which carries no gradient.

    Args: log-probs [B, T] nats (policy carries grad); advantages [B, T]; mask [B, T] bool.
    Settings:
        width: distance in nats at which the weight has fallen to 1 / e; its square without steep.
        steep: square the distance.
    Returns: loss [B, T], 0 where mask is False; and what to log, each [B, T]: ratio_mean, kl_old.
    Source: made up for a test.
    """
    log_r = log_ratio(policy_logprobs.detach(), old_logprobs, mask)
    distance = log_r.square() if steep else log_r.abs()
    weight = (-distance / width).exp()
    loss = -torch.where(mask, advantages, 0.0) * weight * torch.where(mask, policy_logprobs, 0.0)
    return loss, distance_report(log_r, mask)
'''


@pytest.mark.slow
def test_a_loss_that_is_added_as_one_file_needs_no_other_edit(tmp_path: Path) -> None:
    for part in ("src", "tests", "docs", "examples"):
        shutil.copytree(ROOT / part, tmp_path / part)  # with what Python has compiled
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src/posttrain/algos/losses/near_policy.py").write_text(LOSS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    found = "from posttrain.registry import POLICY_LOSSES as r; print(*r.settings('near_policy'))"
    assert _run([sys.executable, "-c", found], tmp_path, environment).split() == ["width", "steep"]
    tests = ["tests/property/test_algos_losses.py", "tests/unit/algos/test_choices.py"]
    said = _run([sys.executable, "-m", "pytest", "-vv", *tests], tmp_path, environment)
    passed = {name: set(re.findall(rf"(\w+)\[{name}\] PASSED", said)) for name in ("near_policy", "gspo")}
    assert passed["near_policy"] == passed["gspo"] and len(passed["gspo"]) >= 5
    assert said.count("near_policy") >= 6, said


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout
