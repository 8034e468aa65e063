"""Checkpoints with a part of what is needed to go on, and plain folders written on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.model import ModelConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.errors import RunStopped
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.run.checkpoint import Checkpoints, Contents
from posttrain.run.checkpoint_folders import damage_of
from posttrain.run.exports import export_models
from posttrain.run.progress import Progress


class Loader:
    def state(self) -> dict[str, int]:
        return {}

    def restore(self, state: dict[str, int]) -> None:
        pass


def engine(model: Path) -> LocalTrainEngine:
    return LocalTrainEngine(
        load_causal_lm(str(model), dtype=torch.float32),
        load_tokenizer(ModelConfig(path=str(model))),
        optimizer=OptimizerConfig(lr=1e-2),
        learning_rate_factor=lambda update: 1.0 if update == 0 else 0.5,
        sequences_per_micro_batch=1,
        sequences_per_scoring_batch=1,
    )


def update(policy: LocalTrainEngine) -> float:
    """One update with gradients of 1 everywhere; its learning rate."""
    for weight in policy._masters.parameters.values():
        weight.grad = torch.ones_like(weight)
    return policy.optimizer_step().lr


def resumed(model: Path, folder: Path, contents: Contents) -> tuple[LocalTrainEngine, list[str]]:
    policy, said = engine(model), []
    assert Checkpoints(folder, contents=contents).restore(Progress(policy=policy, loader=Loader()), said.append) == 1  # type: ignore[arg-type]
    return policy, said


@pytest.fixture
def trained(tiny_llama: Path) -> LocalTrainEngine:
    policy = engine(tiny_llama)
    assert update(policy) == 1e-2
    return policy


def moments(policy: LocalTrainEngine) -> int:
    return sum(len(policy._optimizer.state.get(weight, {})) for weight in policy._masters.parameters.values())


def test_without_the_optimizer_a_checkpoint_is_small_and_says_so_when_a_run_goes_on(
    tmp_path: Path, tiny_llama: Path, trained: LocalTrainEngine
) -> None:
    for name, kept in (("all", True), ("part", False)):
        saved = Checkpoints(tmp_path / name, contents=Contents(save_optimizer=kept))
        saved.save(1, Progress(policy=trained, loader=Loader()))  # type: ignore[arg-type]
        assert damage_of(tmp_path / name / "global_step_1") is None
    assert not (tmp_path / "part/global_step_1/policy/optimizer.safetensors").exists()
    policy, said = resumed(tiny_llama, tmp_path / "part", Contents())
    assert said == ["global_step_1 was saved without the optimizer's averages; they start at 0"]
    assert moments(policy) == 0
    assert update(policy) == 5e-3  # the schedule goes on all the same
    whole, said = resumed(tiny_llama, tmp_path / "all", Contents())
    assert said == [] and moments(whole) == 3 * len(whole._masters.parameters)  # step, and the two averages


def test_what_is_not_to_be_loaded_starts_anew(tmp_path: Path, tiny_llama: Path, trained: LocalTrainEngine) -> None:
    Checkpoints(tmp_path).save(1, Progress(policy=trained, loader=Loader()))  # type: ignore[arg-type]
    policy, said = resumed(tiny_llama, tmp_path, Contents(load_optimizer=False))
    assert (moments(policy), policy.version, said) == (0, 1, [])
    policy, said = resumed(tiny_llama, tmp_path, Contents(load_schedule=False))
    assert policy.version == 0 and moments(policy) > 0
    assert update(policy) == 1e-2  # the rate of the first update


def test_an_export_is_a_plain_folder_with_the_same_weights(tmp_path: Path, trained: LocalTrainEngine) -> None:
    folder = export_models(tmp_path / "exports", 4, trained)
    assert folder == tmp_path / "exports/global_step_4"
    names = {path.name for path in (folder / "policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"engine.json", "optimizer.safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    for name, weight in trained.model.named_parameters():
        assert torch.equal(weight, dict(loaded.named_parameters())[name])
    (folder / "policy/config.json").write_text("damaged")
    export_models(tmp_path / "exports", 4, trained)  # made again, it takes the place of what is there
    assert (folder / "policy/config.json").read_text() != "damaged"
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["global_step_4"]


def test_an_export_that_cannot_be_written_stops_the_run(tmp_path: Path, trained: LocalTrainEngine) -> None:
    (tmp_path / "exports").write_text("a file")
    with pytest.raises(RunStopped, match=r"the models of step 4 could not be exported to .*exports"):
        export_models(tmp_path / "exports", 4, trained)
