"""The example with pictures in three languages: one configuration, which learns for two steps as it is typed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.app import main
from posttrain.data.shapes import Difficulty, write_shapes
from posttrain.dialects.detect import read_config
from posttrain.models.tiny_vision import write_tiny_vision_model

EXAMPLES = Path(__file__).parents[2] / "examples"
NATIVE, VERL, ROLL = "shape_counting.yaml", "verl_shapes.sh", "roll_shapes.yaml"
# Their keys for a run of two steps of two prompts, two samples each.
SMALL = {
    NATIVE: "run.folder=OUT run.total_steps=2 data.prompts_per_step=2 rollout.samples_per_prompt=2 "
    "policy.sequences_per_mini_batch=4 validation.every_steps=2",
    VERL: "+posttrain.run.folder=OUT trainer.total_training_steps=2 data.train_batch_size=2 actor_rollout_ref.rollout.n=2 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=2 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.test_freq=2",
    ROLL: "+posttrain.run.folder=OUT max_steps=2 rollout_batch_size=2 num_return_sequences_in_group=2 eval_steps=2 "
    "actor_train.training_args.per_device_train_batch_size=4",
}


def arguments_of(example: str) -> list[str]:
    """What is typed after ``posttrain train``: the file, or the arguments in the shell script."""
    file = EXAMPLES / example
    if file.suffix == ".yaml":
        return [str(file)]
    words = shlex.split(file.read_text().replace("\\\n", " "), comments=True)
    return [word for word in words[words.index("posttrain") + 2 :] if word != "$@"]


def read(example: str) -> dict[str, Any]:
    """The configuration without the names that each example has of its own, and without epochs where steps are set: verl's 30
    would end the run, too, but these steps are fewer."""
    words = [word for word in arguments_of(example) if word not in ("--dialect", "verl")]
    path = words.pop(0) if words[0].endswith(".yaml") else None
    loaded = read_config(path, words, "verl" if example == VERL else None)
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    assert not loaded.unsupported, [str(problem) for problem in loaded.unsupported]
    config = loaded.config.model_dump(mode="json")
    for section, names in {"run": ("name", "folder"), "tracking": ("project",), "checkpoint": ("folder",)}.items():
        for name in names:
            del config[section][name]
    epochs = config["run"].pop("total_epochs"), config["run"].pop("within_epochs")
    assert config["run"]["total_steps"] and epochs in ((1, False), (30, True))
    return config


@pytest.mark.parametrize("example", [VERL, ROLL])
def test_every_language_is_the_same_configuration(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert read(example) == read(NATIVE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the model that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    difficulty = Difficulty(max_shapes=4, kinds=1, size=24)
    data = folder / "runs/data/shapes"
    write_shapes(data, train_rows=6, validation_rows=2, seed=1, difficulty=difficulty, instruction="")
    write_tiny_vision_model(folder / "runs/models/tiny_vision", vision_width=32, vision_layers=1)
    return folder


def test_every_language_learns_for_two_steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    found = []
    for example, words in SMALL.items():
        out = place / "out" / example
        small = words.replace("OUT", str(out)).split()
        monkeypatch.setattr(sys, "argv", ["posttrain", "train", *arguments_of(example), *small])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, example
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found.append([{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines])
    assert [line["step"] for line in found[0]] == [0, 1, 2]
    assert found[0][1]["gap/max"] < 1e-4
    for example, metrics in zip([VERL, ROLL], found[1:], strict=True):
        assert metrics == found[0], example
