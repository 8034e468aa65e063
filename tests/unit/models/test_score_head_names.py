"""Score heads under the names that other libraries give them: read with their weights, and written under the class's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from posttrain.config.reward import RewardModelConfig
from posttrain.errors import ModelError
from posttrain.libraries.weight_names import score_head_in
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.reward_model import load_reward_model
from posttrain.models.tiny import write_tiny_model
from posttrain.models.value_head import load_value_model
from posttrain.plan.reward_model_files import head_problems, head_shape_problems


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("policy"))
    saved = tmp_path_factory.mktemp("classifier")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(saved)
    return saved


def renamed(classifier: Path, folder: Path, head: str, architecture: str) -> torch.Tensor:
    """Write the model with its head under another name. Returns: the head's weight."""
    weights = load_file(classifier / "model.safetensors")
    weight = weights.pop("score.weight")
    save_file({**weights, f"{head}.weight": weight}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((classifier / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return weight


@pytest.mark.parametrize(
    ("head", "architecture"),
    [
        ("score", "RewardModel"),  # OpenRLHF
        ("value_head", "RewardModel"),
        ("v_head.summary", "LlamaForCausalLM"),  # TRL, verl
        ("classifier", "LlamaForTokenClassification"),
    ],
)
def test_heads_of_other_libraries_keep_their_weights(
    classifier: Path, tmp_path: Path, head: str, architecture: str
) -> None:
    weight = renamed(classifier, tmp_path, head, architecture)
    config = RewardModelConfig(path=str(tmp_path))
    assert list(head_problems(config)) == []
    assert torch.equal(load_reward_model(config, dtype=torch.float32).score.weight, weight)
    tuned = load_value_model(str(tmp_path), dtype=torch.float32, of_sequences=True)
    written = dict(hugging_face_weights(tuned))
    assert torch.equal(written["score.weight"], weight)
    assert written.keys() == load_file(classifier / "model.safetensors").keys()


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    assert score_head_in(str(folder)) is None
    with pytest.raises(ModelError, match="is not a classifier"):
        load_reward_model(RewardModelConfig(path=str(folder)), dtype=torch.float32)
    (problem,) = head_problems(RewardModelConfig(path=str(folder)))
    assert "has no head to score with" in problem.what


def test_unreadable_files_have_no_head(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert score_head_in(str(tmp_path)) is None
    assert score_head_in("org/name") is None


def test_a_head_of_two_labels_is_refused_by_the_plan_too(classifier: Path, tmp_path: Path) -> None:
    weight = renamed(classifier, tmp_path, "score", "LlamaForSequenceClassification")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "score.weight": torch.cat([weight, weight])}, tmp_path / "model.safetensors")
    (problem,) = head_problems(RewardModelConfig(path=str(tmp_path)))
    assert "has 2 labels, and a score is one number" in problem.what


def with_bias(classifier: Path, folder: Path, head: str, bias: float) -> None:
    renamed(classifier, folder, head, "RewardModel")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, f"{head}.bias": torch.tensor([bias])}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("head", ["score", "v_head.summary"])
def test_a_bias_is_kept_in_tuning(classifier: Path, tmp_path: Path, head: str) -> None:
    """transformers' sequence classifiers have no bias, and would shift every score by it."""
    with_bias(classifier, tmp_path, head, 3.5)
    tuned = load_value_model(str(tmp_path), dtype=torch.float32, of_sequences=True)
    assert type(tuned).__name__ == "LlamaForTokenClassification"
    written = dict(hugging_face_weights(tuned))
    assert written["score.bias"].tolist() == [3.5]
    assert torch.equal(written["score.weight"], load_file(tmp_path / "model.safetensors")[f"{head}.weight"])


def test_a_bias_of_zero_changes_no_class(classifier: Path, tmp_path: Path) -> None:
    with_bias(classifier, tmp_path, "score", 0.0)
    tuned = load_value_model(str(tmp_path), dtype=torch.float32, of_sequences=True)
    assert type(tuned).__name__ == "LlamaForSequenceClassification"


def test_heads_are_found_where_no_file_can_be_looked_into(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id: only transformers knows where its files are."""
    with_bias(classifier, tmp_path, "value_head", 2.0)
    monkeypatch.setattr("posttrain.models.value_head.score_head_in", lambda folder: None)
    tuned = load_value_model(str(tmp_path), dtype=torch.float32, of_sequences=True)
    assert dict(hugging_face_weights(tuned))["score.bias"].tolist() == [2.0]
    assert torch.equal(tuned.score.weight.data, load_file(tmp_path / "model.safetensors")["value_head.weight"])


def test_a_head_of_several_layers_is_refused(classifier: Path, tmp_path: Path) -> None:
    """Qwen's reward models: a new head of zeros would take its place without a word."""
    weight = renamed(classifier, tmp_path, "score.2", "Qwen2ForRewardModel")
    weights = load_file(tmp_path / "model.safetensors")
    square = torch.eye(weight.shape[1])
    save_file({**weights, "score.0.weight": square}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"not one linear layer to one number: it has score.0.weight, score.2.weight"):
        load_value_model(str(tmp_path), dtype=torch.float32, of_sequences=True)
    (problem,) = head_problems(RewardModelConfig(path=str(tmp_path)))
    assert "it has score.0.weight, score.2.weight" in problem.what
    (problem,) = head_shape_problems(str(tmp_path), "model.path")
    assert problem.field == "model.path"
