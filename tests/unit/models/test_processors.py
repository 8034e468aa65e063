"""Image tokens and features, held against the families' own processors."""

from __future__ import annotations

import json
import pickle
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor, SmolVLMProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from posttrain.config.data import DataConfig
from posttrain.config.model import ModelConfig
from posttrain.data.images import VISION_MODELS, read_images
from posttrain.data.prompts import load_prompts, unread_image_settings
from posttrain.data.templates import apply_template
from posttrain.errors import DataError, ModelError
from posttrain.models.loading import load_tokenizer
from posttrain.models.processors import ImageProcessor, QwenFamily, SmolFamily, load_processor
from posttrain.models.tiny import write_tiny_model
from posttrain.models.tiny_vision import write_tiny_vision_model
from posttrain.models.vision import FAMILIES

WHOLE = {
    "qwen2_vl": Qwen2VLProcessor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "qwen3_vl_moe": Qwen3VLProcessor,
    "smolvlm": SmolVLMProcessor,
}


def png(width, height, shade=200):
    file = BytesIO()
    Image.radial_gradient("L").resize((width, height)).point(lambda value: value * shade // 255).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_tiny_vision_model(tmp_path_factory.mktemp(name), name) for name in VISION_MODELS}


def processor_of(folder, **data):
    model = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(model)
    return tokenizer, load_processor(model, tokenizer, DataConfig(train_files=[], **data))


def test_the_families_are_those_of_the_models():
    assert set(VISION_MODELS) == set(FAMILIES)


class NoVideos:
    """In the place of a video processor, which cannot be made without torchvision."""

    num_frames, fps = 1, 1
    model_input_names = unused_input_names = ()


@pytest.mark.parametrize("options", [{}, {"do_image_splitting": True, "size": {"longest_edge": 96}}])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_ids_and_features_are_the_whole_processors(folders, monkeypatch, tmp_path, name, options):
    if options and name != "smolvlm":
        options = {"max_pixels": 24 * 24}
    tokenizer, ours = processor_of(folders[name], image_options=options)
    images = read_images([png(40, 20), png(17, 90)], tmp_path, 10**6)
    user = [{"type": "image"}, {"type": "text", "text": "Compare\nit with "}, {"type": "image"}]
    messages = [{"role": "system", "content": "You see."}, {"role": "user", "content": user}]

    text, ids = apply_template(
        tokenizer, messages, {}, processor=ours, sizes=[(image.width, image.height) for image in images]
    )
    prompt = ours.prompt_images(images)

    monkeypatch.setattr(processing_smolvlm, "num2words", str)  # a package it asks for, and uses for videos alone
    monkeypatch.setattr(WHOLE[name], "check_argument_for_proper_class", lambda *_: None)
    own = {"image_seq_len": 16} if name == "smolvlm" else {}  # (32 / 4 / 2)^2
    whole = WHOLE[name](ours._images, tokenizer, NoVideos(), **own)
    theirs = whole(
        images=[Image.open(BytesIO(image.content)).convert("RGB") for image in images], text=[text], return_tensors="np"
    )
    assert ids == theirs["input_ids"][0].tolist()
    assert {name: array.shape for name, array in prompt.features.items()} == {
        name: theirs[name].shape for name in ours._images.model_input_names
    }
    assert all(np.array_equal(array, theirs[name]) for name, array in prompt.features.items())
    assert prompt.features["pixel_values"].dtype == np.float32


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_smolvlm_tiles_are_those_that_are_made(width, height, resize):
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 8}, do_resize=resize, return_row_col_info=True
    )
    made = images([Image.new("RGB", (width, height))], return_tensors=None)

    family = SmolFamily(images, tokens_per_tile=1)

    assert family.grid((width, height)) == (made["rows"][0][0], made["cols"][0][0])
    assert family.units((width, height)) == made["pixel_values"].shape[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200))
def test_qwen_patches_are_those_that_are_made(width, height):
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    made = images([Image.new("RGB", (width, height))], return_tensors=None)
    assert QwenFamily(images).units((width, height)) == len(made["pixel_values"])


def test_counts_by_hand(folders):
    """Qwen: 40 x 20 pixels become 40 x 24 (multiples of 8, round half to even: 20 / 8 = 2.5 -> 2, so 40 x 16), 5 x 2 = 10
    tokens. SmolVLM without splitting: one tile of 32 x 32, (32 / 4 / 2)^2 = 16 tokens, whatever the shape."""
    assert processor_of(folders["qwen2_vl"])[1].tokens((40, 20)) == 10
    assert processor_of(folders["smolvlm"])[1].tokens((40, 20)) == 16


# ------------------------------------------------------------------------------------------------ prompts


def dataset(folder, rows):
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def asked(folder, number, width=40, height=20, text="<image>?"):
    (folder / f"{number}.png").write_bytes(png(width, height))
    return {"prompt": text, "data_source": "shapes", "answer": "1", "images": [f"{number}.png"]}


def text_only(text="Hi"):
    return {"prompt": text, "data_source": "shapes", "answer": "1", "images": None}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompts_count_image_tokens_and_share_one_object(folders, tmp_path, workers):
    tokenizer, processor = processor_of(folders["qwen2_vl"])
    file = dataset(tmp_path, [asked(tmp_path, 0), text_only()])
    data = DataConfig(train_files=[file], filter_workers=workers)

    seen, plain = load_prompts([file], data, tokenizer, what="training", processor=processor).prompts

    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert seen.token_ids.count(image_token) == 10
    assert seen.text.count("<|image_pad|>") == 1  # for people
    assert seen.images is not None and seen.images.features["image_grid_thw"].tolist() == [[1, 4, 10]]
    assert plain.images is None and image_token not in plain.token_ids


@pytest.mark.parametrize("rule", ["error", "truncate_left", "truncate_right", "truncate_middle"])
def test_a_prompt_with_images_is_never_cut(folders, tmp_path, rule):
    tokenizer, processor = processor_of(folders["qwen2_vl"])
    file = dataset(tmp_path, [asked(tmp_path, 0), text_only()])
    data = DataConfig(train_files=[file], max_prompt_tokens=25, overlong_prompts=rule)

    with pytest.raises(DataError) as error:
        load_prompts([file], data, tokenizer, what="training", processor=processor)

    (problem,) = error.value.problems
    assert "1 of 2 training prompts are longer than 25 tokens: train.jsonl:0 has" in problem.what
    assert problem.what.endswith("its images' tokens among them; a prompt with images is not cut")
    assert "lower what an image takes with data.image_options, or set data.overlong_prompts to filter" in problem.fix


def test_filtering_drops_long_images_and_image_options_make_them_fit(folders, tmp_path):
    """40 x 20 pixels are 10 tokens, and at most 16 x 16 of them 3 or fewer."""
    tokenizer, processor = processor_of(folders["qwen2_vl"])
    file = dataset(tmp_path, [asked(tmp_path, 0), text_only()])
    data = DataConfig(train_files=[file], max_prompt_tokens=29, overlong_prompts="filter")
    found = load_prompts([file], data, tokenizer, what="training", processor=processor)
    assert ([prompt.prompt_id for prompt in found.prompts], found.dropped) == (["train.jsonl:1"], 1)

    tokenizer, small = processor_of(folders["qwen2_vl"], image_options={"max_pixels": 256})
    assert small.tokens((40, 20)) <= 3
    assert load_prompts([file], data, tokenizer, what="training", processor=small).dropped == 0


@pytest.mark.parametrize(
    ("text", "size", "what"),
    [
        ("<image> and <|image_pad|>", (8, 8), "the chat template writes 2 image tokens for 1 images"),
        ("<image>", (1, 400), "the image processor refuses image 0 of 1 x 400 pixels: absolute aspect ratio"),
    ],
)
def test_rows_that_the_processor_refuses_are_named(folders, tmp_path, text, size, what):
    tokenizer, processor = processor_of(folders["qwen2_vl"])
    file = dataset(tmp_path, [asked(tmp_path, 0), asked(tmp_path, 1, *size, text=text)])
    with pytest.raises(DataError) as error:
        load_prompts([file], DataConfig(train_files=[file]), tokenizer, what="training", processor=processor)
    assert error.value.problems[0].what.startswith(f"row 1 of train.jsonl: {what}")


def test_a_model_that_reads_text_only_is_given_no_images(tmp_path):
    folder = write_tiny_model(tmp_path / "text")
    tokenizer, processor = processor_of(folder)
    assert processor is None
    file = dataset(tmp_path, [text_only(), asked(tmp_path, 0)])

    with pytest.raises(ModelError) as error:
        load_prompts([file], DataConfig(train_files=[file]), tokenizer, what="training")
    (problem,) = error.value.problems
    assert problem.what == ("1 of 2 prompts have images (train.jsonl:1 is the first), and the model reads text only")
    assert "data.image_column=null" in problem.fix

    blind = DataConfig(train_files=[file], image_column=None)
    assert len(load_prompts([file], blind, tokenizer, what="training").prompts) == 2


def test_settings_that_no_prompt_reads_are_told(folders, tmp_path):
    tokenizer, processor = processor_of(folders["qwen2_vl"])
    file = dataset(tmp_path, [asked(tmp_path, 0), text_only()])
    data = DataConfig(train_files=[file], image_cache_mib=1, max_image_pixels=10**6)
    seen, plain = load_prompts([file], data, tokenizer, what="training", processor=processor).prompts

    assert unread_image_settings(data, [seen, plain]) == []
    told = ["data.max_image_pixels, data.image_cache_mib have no effect: no prompt has images"]
    assert unread_image_settings(data, [plain]) == told
    assert unread_image_settings(DataConfig(train_files=[file]), [plain]) == []


# ------------------------------------------------------------------------------------------------ memory


class Counting:
    """An image processor of which every file is one patch of four values (16 bytes)."""

    model_input_names = ("pixel_values",)
    merge_size = 1

    def __init__(self):
        self.calls = 0

    def get_number_of_image_patches(self, height, width):
        return 1

    def __call__(self, images, return_tensors):
        self.calls += 1
        return {"pixel_values": np.full((len(images), 4), float(images[0].width), dtype=np.float32)}


def test_features_are_made_once_and_the_least_used_go_first(tmp_path):
    images = Counting()
    processor = ImageProcessor(images, QwenFamily(images), cache_bytes=32)  # room for two
    first, second, third = (processor.prompt_images(read_images([png(n, 1)], tmp_path, 99)) for n in (1, 2, 3))
    assert images.calls == 0

    for prompt in (first, first, second, first):
        assert prompt.features["pixel_values"].shape == (1, 4)
    assert images.calls == 2
    assert third.features["pixel_values"][0, 0] == 3.0  # takes the room of the second
    assert first.features["pixel_values"][0, 0] == 1.0
    assert images.calls == 3
    assert second.features["pixel_values"][0, 0] == 2.0
    assert images.calls == 4


def test_the_last_prompt_stays_whatever_its_size(tmp_path):
    images = Counting()
    processor = ImageProcessor(images, QwenFamily(images), cache_bytes=0)
    first, second = (processor.prompt_images(read_images([png(n, 1)], tmp_path, 99)) for n in (1, 2))
    for prompt in (first, first, second, second, first):
        assert prompt.features["pixel_values"].shape == (1, 4)
    assert images.calls == 3


def test_in_another_process_features_are_plain_arrays(tmp_path):
    images = Counting()
    processor = ImageProcessor(images, QwenFamily(images), cache_bytes=0)
    prompt = processor.prompt_images(read_images([png(7, 1)], tmp_path, 99))

    copy = pickle.loads(pickle.dumps(prompt))  # noqa: S301  # our own

    assert type(copy.features) is dict and copy.content_hash == prompt.content_hash
    assert np.array_equal(copy.features["pixel_values"], prompt.features["pixel_values"])


# ------------------------------------------------------------------------------------------------ loading


def test_problems_of_the_folder_are_told(tmp_path):
    folder = write_tiny_vision_model(tmp_path / "model")
    with pytest.raises(ModelError) as error:
        processor_of(folder, image_options={"max_pixel": 9, "patch_size": 7})
    assert [(problem.field, problem.fix) for problem in error.value.problems] == [
        ("data.image_options.max_pixel", "did you mean max_pixels?"),
        ("data.image_options.patch_size", "known: max_pixels, min_pixels, size"),
    ]

    file = folder / "preprocessor_config.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "patch_size": 7}))
    with pytest.raises(ModelError, match=r"patch, merge and temporal size \(7, 2, 2\), and its model \(4, 2, 2\)"):
        processor_of(folder)

    file.unlink()
    with pytest.raises(ModelError, match=r"no image processor could be loaded from .*needs preprocessor_config\.json"):
        processor_of(folder)


def test_smolvlm_sizes_are_checked(tmp_path):
    folder = write_tiny_vision_model(tmp_path / "model", "smolvlm")
    with pytest.raises(ModelError, match=r"has size .*; longest_edge is needed"):
        processor_of(folder, image_options={"size": {"height": 8, "width": 8}})

    file = folder / "preprocessor_config.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "max_image_size": {"longest_edge": 64}}))
    with pytest.raises(ModelError, match="has image size 64, and its model 32"):
        processor_of(folder)
