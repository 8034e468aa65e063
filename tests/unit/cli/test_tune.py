"""``posttrain tune`` as its users type it: one clear error for each thing that is wrong, before torch is loaded; and what a plan
says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.cli.app import main
from posttrain.config.tune import TuneConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.plan.checks.tune import warnings_of
from posttrain.plan.tune import plan_tune

Run = Callable[..., tuple[int, str, str]]
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


@pytest.fixture
def posttrain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``posttrain ARGUMENTS``: (exit code, stdout, stderr without line breaks)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, " ".join(shown.err.split())

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a request in which everything is right."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(PAIR) + "\n" for _ in range(10)))
    (tmp_path / "equal.jsonl").write_text(json.dumps(PAIR) + "\n" + json.dumps(PAIR | {"rejected": "4"}) + "\n")
    (tmp_path / "run.yaml").write_text(
        "model: {path: model}\ndata: {train_files: pairs.jsonl, sequences_per_step: 8}\n"
        "method: {name: dpo}\nrun: {name: r}\ntracking: {trackers: []}\n"
    )
    return tmp_path


WRONG = [
    ("method.name=dppo", "there is no tuning method called 'dppo' (known: dpo, kto, orpo, reward_model, simpo), at"),
    ("method.betta=1", "there is no key method.betta"),
    ("method.beta=0", "beta"),
    ("method.loss=ipoo", "method.loss"),
    ("data.train_files=equal.jsonl", "row 1 of equal.jsonl: column rejected holds the same as column chosen"),
    ("data.rejected_column=worse", "pairs.jsonl has no column worse (it has prompt, chosen, rejected)"),
    ("data.rejected_column=chosen", "both sides of a pair are read from column chosen, so every pair has equal sides"),
    ("data.sequences_per_step=7", "7 sequences are no whole number of pairs"),
    ("data.sequences_per_step=22", "the training files hold 10 pairs, fewer than the 11 of one step (22 sequences)"),
    ("method.name=kto data.sequences_per_step=1", "kto compares a completion with those of other prompts"),
    ("method.name=kto method.desirable_weight=0 method.undesirable_weight=0", "are 0, so nothing is learned"),
    ("method.name=kto reference.precompute=true", "kto estimates a KL on completions of other prompts in every step"),
    ("method.name=orpo data.reference_columns=[a,b]", "orpo has no reference"),
    ("data.reference_columns=[a]", "names 1 column, and a row has 2 completions"),
    ("method.label_smoothing=0.7", "label_smoothing must be below 0.5, not 0.7"),
    ("method.loss=robust method.label_smoothing=0.5", "label_smoothing must be below 0.5"),
    ("method.name=simpo method.label_smoothing=0.5", "label_smoothing must be below 0.5"),
    (
        "data.dataset_class_file=own.py data.dataset_class_name=Own",
        "there is no file own.py",
    ),
    ("model.path=nowhere/at/all", "there is no folder nowhere/at/all"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=[overrides for overrides, _ in WRONG])
def test_one_clear_error_for_each_thing_that_is_wrong(posttrain: Run, job: Path, overrides: str, message: str) -> None:
    code, _, err = posttrain("plan", "run.yaml", *overrides.split())
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_plan_counts_pairs_and_sequences(posttrain: Run, job: Path) -> None:
    code, out, _ = posttrain("plan", "run.yaml", "policy.sequences_per_micro_batch_per_device=4")
    assert code == 0
    for part in ("4 pairs = 8 sequences, 1 update", "micro-batches: 2 of up to 4 sequences", "pairs.jsonl: 10 pairs"):
        assert part in out
    assert "10 pairs / 4 per step = 2 steps per epoch, 2 pairs left out of each" in out
    assert out.rstrip().endswith("trains here")


def test_pairs_are_two_rows_for_kto(posttrain: Run, job: Path) -> None:
    _, out, _ = posttrain("plan", "run.yaml", "method.name=kto")
    assert "20 completions / 8 per step = 2 steps per epoch, 4 completions left out of each" in out


def config(**sections: object) -> TuneConfig:
    return TuneConfig.model_validate(
        {"model": {"path": "m"}, "data": {"train_files": ["a"], "sequences_per_step": 8}} | sections
    )


def test_micro_batches_hold_whole_pairs() -> None:
    odd = config(policy={"sequences_per_micro_batch_per_device": 3})
    plan, _ = plan_tune(odd, 4)
    assert plan is not None
    assert (plan.sequences_per_micro_batch_per_device, plan.gradient_accumulation_steps) == (2, 4)
    assert any("no micro-batch divides a pair, so they hold 2 sequences" in text for text in warnings_of(odd))


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        ({"method": {"name": "orpo", "gamma": 2.0}}, "method.gamma=2.0 has no effect: orpo has no such setting"),
        (
            {"method": {"name": "simpo"}, "reference": {"path": "x"}},
            "reference.path has no effect: simpo has no reference",
        ),
        (
            {"method": {"name": "dpo", "loss": "hinge", "label_smoothing": 0.1}},
            "method.label_smoothing has no effect: method.loss=hinge",
        ),
        ({"policy": {"lora": {}}, "reference": {"offload": True}}, "it is the policy without its adapter"),
    ],
)
def test_settings_without_effect_are_reported(sections: dict[str, object], warning: str) -> None:
    assert any(warning in text for text in warnings_of(config(**sections)))
