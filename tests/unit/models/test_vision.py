"""Positions and embeddings of prompts with images, by hand, and folders of tiny vision-language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from posttrain.config.lora import LoraConfig
from posttrain.errors import ModelError
from posttrain.models.loading import auto_class, load_causal_lm
from posttrain.models.lora import adapter_layers, add_adapter
from posttrain.models.tiny_vision import write_tiny_vision_model
from posttrain.models.value_head import load_value_model, value_head
from posttrain.models.vision import (
    AddedFeatures,
    copy_processor,
    image_features,
    model_inputs,
    position_shift,
    vision_parts,
)
from posttrain.records.images import PlacedImages, PromptImages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("qwen2_vl"), "qwen2_vl")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_causal_lm(str(folder), dtype=torch.float32)


def images_of(name: str, *grids: tuple[int, int]) -> PromptImages:
    """Random patches of 4 x 4 x 3 x 2 values; (rows, columns) of patches of each image."""
    patches = sum(rows * columns for rows, columns in grids)
    values = np.random.default_rng(len(name)).normal(size=(patches, 96)).astype(np.float32)
    grid = np.array([(1, rows, columns) for rows, columns in grids], dtype=np.int64)
    return PromptImages(files=(), features={"pixel_values": values, "image_grid_thw": grid}, content_hash=name)


def test_positions_and_embeddings_by_hand(model: Any) -> None:
    """A text of 2 tokens; then a prompt of 1 + 6 image tokens + 2, and 2 tokens of a response."""
    image = model.config.image_token_id
    ids = torch.tensor([65, 66, 70, *[image] * 6, 71, 72, 73, 74])
    text = torch.tensor([0, 1, *range(9), 9, 10])
    picture = images_of("a", (4, 6))  # 4 x 6 patches: 2 rows of 3 tokens
    placed = PlacedImages(images=picture, start=2, prompt=9, end=13)
    inputs = model_inputs(model, ids, text, [placed])
    # Time, height and width of the image's tokens start at 1, and what follows goes on behind the largest: 1 + 3 = 4.
    time = [0, 1, *[0, 1, 1, 1, 1, 1, 1, 4, 5], 6, 7]
    height = [0, 1, *[0, 1, 1, 1, 2, 2, 2, 4, 5], 6, 7]
    width = [0, 1, *[0, 1, 2, 3, 1, 2, 3, 4, 5], 6, 7]
    assert inputs["position_ids"][:, 0].tolist() == [time, height, width]
    assert position_shift(inputs["position_ids"], 2, 11) == 6 - 9  # the response begins at 6 instead of 9
    assert position_shift(inputs["position_ids"], 0, 2) == 0
    expected = model.get_input_embeddings()(ids)
    expected[3:9] = image_features(model, [picture])["a"]
    assert torch.equal(inputs["inputs_embeds"][0], expected)


def test_without_images_a_model_reads_ids(model: Any) -> None:
    ids = torch.tensor([65, 66])
    inputs = model_inputs(model, ids, torch.tensor([0, 1]))
    assert inputs.keys() == {"input_ids", "position_ids"}
    assert inputs["input_ids"].tolist() == [[65, 66]]


def test_features_are_the_same_alone_and_together(model: Any) -> None:
    a, bc = images_of("a", (2, 4)), images_of("bc", (4, 4), (2, 2))
    together = image_features(model, [a, bc, a])
    assert list(together) == ["a", "bc"]  # equal images once
    assert [len(features) for features in together.values()] == [2, 5]  # 2 x 4 / 4; 4 x 4 / 4 + 2 x 2 / 4
    for one in (a, bc):
        alone = image_features(model, [one])[one.content_hash]
        torch.testing.assert_close(together[one.content_hash], alone, rtol=0, atol=1e-6)


def test_tiles_of_smolvlm_together(tmp_path: Path) -> None:
    smol = load_causal_lm(str(write_tiny_vision_model(tmp_path, "smolvlm")), dtype=torch.float32)
    random = np.random.default_rng(0)

    def tiles(name: str, count: int) -> PromptImages:
        values = random.normal(size=(1, count, 3, 32, 32)).astype(np.float32)
        mask = np.ones((1, count, 32, 32), dtype=np.int64)
        features = {"pixel_values": values, "pixel_attention_mask": mask}
        return PromptImages(files=(), features=features, content_hash=name)

    prompts = [tiles("one", 1), tiles("three", 3)]
    together = image_features(smol, prompts)
    assert [len(features) for features in together.values()] == [16, 48]
    for one in prompts:
        alone = image_features(smol, [one])[one.content_hash]
        torch.testing.assert_close(together[one.content_hash], alone, rtol=0, atol=1e-6)
    assert vision_parts(smol) == ["model.vision_model", "model.connector"]


def test_a_wrong_count_of_features_is_told(model: Any) -> None:
    image = model.config.image_token_id
    ids = torch.tensor([65, image, image, 66])
    placed = PlacedImages(images=images_of("a", (2, 2)), start=0, prompt=4, end=4)
    with pytest.raises(ModelError, match="2 image tokens, and the model makes 1 features"):
        model_inputs(model, ids, torch.arange(4), [placed])


def test_features_of_a_slice_by_hand() -> None:
    """Image tokens at places 1, 3 and 4 of a row of 5; two slices of 3, the second with a place of padding."""
    features = (torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [20.0], [30.0]]))
    whole = AddedFeatures(torch.tensor([1, 3, 4]), features, 5)
    first, second = (
        whole.part(lambda values, at=at: torch.cat([values, values.new_zeros(1)])[at : at + 3]) for at in (0, 3)
    )
    assert first.places.tolist() == [1] and [each.tolist() for each in first.features] == [[[1.0]], [[10.0]]]
    assert second.places.tolist() == [0, 1]
    states = torch.tensor([[[0.5], [0.25], [7.0]]])
    assert second.to_states(1, states).tolist() == [[[20.5], [30.25], [7.0]]]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "fc1", "qkv"], r".*(q_proj|proj)"])
@pytest.mark.parametrize("excluded", [None, ["k_proj"], r".*\.k_proj"])
def test_a_tower_gets_no_adapter(folder: Path, targets: Any, excluded: Any) -> None:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    add_adapter(model, LoraConfig(rank=2, target_modules=targets, exclude_modules=excluded))
    names = [name for name, _ in adapter_layers(model)]
    assert names
    assert all(name.startswith("model.language_model.") for name in names)
    assert any(name.endswith("q_proj") for name in names)
    assert excluded is None or not any(name.endswith("k_proj") for name in names)


def test_the_same_arguments_write_the_same_model(tmp_path: Path, folder: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = write_tiny_vision_model(tmp_path / "again", "qwen2_vl")
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "preprocessor_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    other = write_tiny_vision_model(tmp_path / "other", "qwen2_vl", seed=1)
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_transformers_reads_a_tiny_folder(tmp_path: Path, family: Any) -> None:
    folder = write_tiny_vision_model(tmp_path, family)
    config = AutoConfig.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == config.get_text_config().vocab_size
    assert type(AutoImageProcessor.from_pretrained(folder, backend="pil")).__name__.endswith("Pil")
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    written = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=True, return_dict=True)
    assert written["input_ids"].count(config.image_token_id) == 1
    assert auto_class(config).__name__ == "AutoModelForImageTextToText"


def test_processor_files_are_copied_and_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text("{}")
    copy_processor(str(folder), tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["patch_size"] == 4
    assert (tmp_path / "processor_config.json").read_text() == "{}"
    assert not (tmp_path / "video_preprocessor_config.json").exists()  # the model has none


def test_a_family_that_is_not_supported_is_named(tmp_path: Path) -> None:
    AutoConfig.for_model("internvl").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"internvl at .* is a vision-language model of a family that is not supported"
    ):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


def test_a_vision_language_model_is_a_critic_with_its_vision_tower(folder: Path) -> None:
    model = load_value_model(str(folder), dtype=torch.float32)
    assert vision_parts(model) and value_head(model).weight.shape[0] == 1
