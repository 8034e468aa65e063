"""The examples, one in each language: the same run, written four times, is the same configuration and the same losses."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.app import main
from posttrain.data.reasoning_gym import write_dataset
from posttrain.dialects.detect import read_config

EXAMPLES = Path(__file__).parents[2] / "examples"
GRPO = ("grpo_chain_sum.yaml", "verl_grpo.sh", "skyrl_grpo.sh", "roll_rlvr.yaml")
PPO = ("ppo_chain_sum.yaml", "verl_ppo.yaml")

# Their key for the model, and for the length of a run of two steps.
MODEL = {
    "native": "model.path",
    "verl": "actor_rollout_ref.model.path",
    "skyrl": "trainer.policy.model.path",
    "roll": "pretrain",
}
FOLDER = {
    "native": "run.folder",
    "verl": "+posttrain.run.folder",
    "skyrl": "+posttrain.run.folder",
    "roll": "+posttrain.run.folder",
}


def dialect_of(example: str) -> str:
    name = example.partition("_")[0]
    return name if name in MODEL else "native"


def arguments_of(example: str) -> list[str]:
    """What is typed after ``posttrain train``: the file, or the arguments in the shell script."""
    file = EXAMPLES / example
    if file.suffix == ".yaml":
        return [str(file)]
    words = shlex.split(file.read_text().replace("\\\n", " "), comments=True)
    start = words.index("posttrain") + 2  # posttrain train ...
    return [os.path.expandvars(word) for word in words[start:] if word != "$@"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    write_dataset(
        "chain_sum",
        folder / "runs/data/chain_sum",
        train_rows=24,
        validation_rows=4,
        seed=1,
        options=options,
        instruction=None,
    )
    return folder


def read(example: str) -> dict[str, Any]:
    """The configuration without the names that each example has of its own, and without epochs where steps are set: verl's 30
    would end the run, too, but these steps are fewer."""
    arguments = arguments_of(example)
    dialect = arguments[arguments.index("--dialect") + 1] if "--dialect" in arguments else None
    words = [word for word in arguments if not word.startswith("--") and word != dialect]
    path = words.pop(0) if words[0].endswith(".yaml") else None
    loaded = read_config(path, words, dialect, here="--here" in arguments)
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    assert not loaded.unsupported, [str(problem) for problem in loaded.unsupported]
    config = loaded.config.model_dump(mode="json")
    for section, names in {"run": ("name", "folder"), "tracking": ("project",), "checkpoint": ("folder",)}.items():
        for name in names:
            del config[section][name]
    epochs = config["run"].pop("total_epochs"), config["run"].pop("within_epochs")
    assert config["run"]["total_steps"] and epochs in ((1, False), (30, True))
    return config


@pytest.mark.parametrize("example", GRPO[1:])
def test_grpo_in_every_language_is_the_same_configuration(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert read(example) == read(GRPO[0])


@pytest.mark.parametrize("example", PPO[1:])
def test_ppo_in_every_language_is_the_same_configuration(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert read(example) == read(PPO[0])


def run(example: str, place: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Two steps as they are typed, on a tiny model; the metrics without times."""
    dialect = dialect_of(example)
    folder = place / "out" / example
    own = "" if dialect == "native" else "+posttrain."
    extra = [f"{MODEL[dialect]}={model}", f"{FOLDER[dialect]}={folder}", f"{own}run.total_steps=2"]
    extra += [f"{own}model.compute_dtype=float32", f"{own}placement.cpu_threads=1", f"{own}checkpoint.folder=null"]
    extra.append(f"{own}reward.workers=1")  # each imports reasoning_gym
    if example in PPO:  # both models are updated within two steps
        extra.append(f"{own}critic.warmup_steps=1")
    if dialect == "roll":  # its own length stands in the file
        extra[2] = "max_steps=2"
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["posttrain", "train", *arguments_of(example), *extra])
    for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, example
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(("time/", "speed/"))} for line in lines]


@pytest.mark.slow
def test_grpo_in_every_language_has_the_same_losses(
    place: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = [run(example, place, tiny_llama, monkeypatch) for example in GRPO]
    assert [line["step"] for line in first] == [0, 1, 2]
    assert "policy/loss" in first[1]
    for example, metrics in zip(GRPO[1:], others, strict=True):
        assert metrics == first, example


def test_ppo_in_every_language_has_the_same_losses(
    place: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = [run(example, place, tiny_llama, monkeypatch) for example in PPO]
    assert "critic/loss" in first[1]
    for example, metrics in zip(PPO[1:], others, strict=True):
        assert metrics == first, example
