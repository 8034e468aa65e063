"""Image processors of vision models, in the form that needs PIL only, and each family's form of an image in a prompt.

A chat template writes one image token per image. The family's processor replaces it with as many as the model reads, which
depends on the image's size only, so prompts are tokenised without decoding images; pixel values are computed on first
use. The PIL form is used even where torchvision is installed: pixels are then the same on every machine.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.smolvlm.image_processing_pil_smolvlm import get_resize_output_image_size

from posttrain.config.images import ImageSettings
from posttrain.config.model import ModelConfig
from posttrain.data.images import ImageFile, decode
from posttrain.errors import DataError, ModelError, PosttrainError, Problem, did_you_mean
from posttrain.models.loading import expanded, first_line, load_model_config
from posttrain.records.images import PromptImages, hash_of_files

Size = tuple[int, int]  # width and height of an image file, pixels


class Family(Protocol):
    """Conversion of images by a model family, depending on their size."""

    @property
    def token(self) -> str:
        """The token that stands for an image in the output of a chat template."""

    @property
    def axis(self) -> int:
        """Dimension of pixel_values along which the units are stored."""

    def units(self, size: Size) -> int:
        """Return the rows of the image in pixel_values: patches, or tiles. Raises: ValueError for an unsupported shape."""

    def text(self, size: Size) -> str:
        """Return the text of an image in the prompt."""


@dataclass(frozen=True, slots=True)
class QwenFamily:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images keep their aspect ratio; a square of patches is a token. arXiv:2409.12191,
    section 2.1."""

    images: Any
    token: str = "<|image_pad|>"
    axis: int = 0

    def units(self, size: Size) -> int:
        width, height = size
        return int(self.images.get_number_of_image_patches(height, width))

    def text(self, size: Size) -> str:
        return self.token * (self.units(size) // self.images.merge_size**2)


@dataclass(frozen=True, slots=True)
class SmolFamily:
    """SmolVLM: a grid of square tiles and the whole image as one more, or, without splitting, only the whole image.
    arXiv:2504.05299, section 2."""

    images: Any
    tokens_per_tile: int
    token: str = "<image>"
    axis: int = 1

    def grid(self, size: Size) -> tuple[int, int]:
        """Return the rows and columns of tiles, 0 and 0 without splitting.

        The image is scaled twice, as in ``_preprocess``; its own helper get_number_of_image_patches takes a shortcut that gives
        another number of rows for some shapes (transformers 5.23).
        """
        images, (width, height) = self.images, size
        if not images.do_image_splitting:
            return 0, 0
        if images.do_resize:
            height, width = get_resize_output_image_size(_shape(height, width), images.size["longest_edge"])
        side = images.max_image_size["longest_edge"]
        ratio = width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        return (height // side, width // side) if height > side or width > side else (0, 0)

    def units(self, size: Size) -> int:
        rows, columns = self.grid(size)
        return rows * columns + 1

    def text(self, size: Size) -> str:
        rows, columns = self.grid(size)
        around, tile = "<fake_token_around_image>", self.token * self.tokens_per_tile
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if rows else "") + f"{around}<global-img>{tile}{around}"


def _shape(height: int, width: int) -> np.ndarray:
    """Return an array of an image's shape that takes no memory."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


class ImageProcessor:
    """The image processor of one model. A copy in another process caches nothing.

    Args: ``cache_bytes`` bounds the cached features; the least recently used are dropped first, and the newest are kept
        even when they are larger.
    """

    def __init__(self, images: Any, family: Family, cache_bytes: int):
        self._images = images
        self._family = family
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[int, LazyFeatures] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    @property
    def token(self) -> str:
        """The token of images."""
        return self._family.token

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageProcessor, (self._images, self._family, self._cache_bytes)

    def expand(self, text: str, sizes: Sequence[Size]) -> str:
        """Replace every image token of a templated prompt with the tokens that the model reads for that image.

        Raises: DataError when the numbers of image tokens and images differ, or an image has an unsupported shape.
        """
        token = self._family.token
        pieces = text.split(token)
        if len(pieces) - 1 != len(sizes):
            what = f"the chat template writes {len(pieces) - 1} image tokens for {len(sizes)} images"
            fix = f"a text must not hold {token} itself, and the template must write one per image part"
            raise DataError(Problem(what, fix=fix))
        written = [pieces[0]]
        for number, (size, piece) in enumerate(zip(sizes, pieces[1:], strict=True)):
            try:
                written += [self._family.text(size), piece]
            except ValueError as error:
                what = f"the image processor refuses image {number} of {size[0]} x {size[1]} pixels: {error}"
                raise DataError(Problem(what, fix="crop or scale the image")) from error
        return "".join(written)

    def tokens(self, size: Size) -> int:
        """Count the image tokens of an image of this size, without marks of places and edges. Raises: ValueError."""
        return self._family.text(size).count(self._family.token)

    def prompt_images(self, files: Sequence[ImageFile]) -> PromptImages:
        """Return the images of a prompt, whose features are computed on first use."""
        contents = tuple(file.content for file in files)
        features = LazyFeatures(self, contents, sum(self._family.units((file.width, file.height)) for file in files))
        return PromptImages(files=contents, features=features, content_hash=hash_of_files(contents))

    def process(self, files: Sequence[bytes], units: int) -> dict[str, np.ndarray]:
        """Compute the features of some files together; ``units`` is the number expected from their sizes."""
        # A batch of one prompt: SmolVLM adds a batch dimension, the Qwen families put all images in a row.
        output = self._images([decode(file) for file in files], return_tensors=None)
        features = {name: np.ascontiguousarray(output[name]) for name in self._images.model_input_names}
        features["pixel_values"] = features["pixel_values"].astype(np.float32, copy=False)
        if (made := features["pixel_values"].shape[self._family.axis]) != units:
            raise PosttrainError(f"the image processor made {made} units of images, and their tokens are for {units}")
        return features

    def keep(self, features: LazyFeatures, made: Mapping[str, np.ndarray]) -> None:
        """Cache ``made`` as the features of ``features``, dropping the least recently used ones when space is needed."""
        with self._lock:
            if id(features) not in self._kept:
                self._size += _bytes(made)
                self._kept[id(features)] = features
            while self._size > self._cache_bytes and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._size -= oldest.forget()

    def used(self, features: LazyFeatures) -> None:
        with self._lock:
            if id(features) in self._kept:
                self._kept.move_to_end(id(features))


class LazyFeatures(Mapping[str, np.ndarray]):
    """The features of a prompt's images, computed on first use. Pickled, they are a plain dict."""

    __slots__ = ("_files", "_made", "_processor", "_units")

    def __init__(self, processor: ImageProcessor, files: tuple[bytes, ...], units: int):
        self._processor = processor
        self._files = files
        self._units = units
        self._made: dict[str, np.ndarray] | None = None

    def forget(self) -> int:
        """Drop the computed features. Returns: their bytes."""
        made, self._made = self._made, None
        return _bytes(made or {})

    def _features(self) -> dict[str, np.ndarray]:
        made = self._made
        if made is None:
            made = self._processor.process(self._files, self._units)
            self._made = made
            self._processor.keep(self, made)
        else:
            self._processor.used(self)
        return made

    def __getitem__(self, name: str) -> np.ndarray:
        return self._features()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features())

    def __len__(self) -> int:
        return len(self._features())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._features()),)


def _bytes(features: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in features.values())


# ------------------------------------------------------------------------------------------------ loading


def load_processor(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, data: ImageSettings
) -> ImageProcessor | None:
    """Load the image processor of a vision model; None for a text-only model.

    Raises: ModelError when a vision model has none, it does not fit the model or the tokenizer, or data.image_options has an
        unknown key.
    """
    config = load_model_config(model.path, model.trust_remote_code)
    if config.model_type not in _FAMILIES:
        return None
    path = expanded(model.path)
    # These families need no code from the folder.
    ours: dict[str, Any] = {"backend": "pil", "trust_remote_code": False}
    try:
        images = AutoImageProcessor.from_pretrained(path, **ours)
    except (OSError, ValueError, ImportError) as error:
        what = f"no image processor could be loaded from {path}: {first_line(error)}"
        fix = "a vision model's folder needs preprocessor_config.json; copy it from where the model is published"
        raise ModelError(Problem(what, fix=fix, field="model.path")) from error
    known = sorted({*_annotations(type(images).valid_kwargs)} & _OPTIONS)
    problems = [
        Problem(
            f"{type(images).__name__.removesuffix('Pil')} has no setting {name}",
            fix=did_you_mean(name, known) or f"known: {', '.join(known)}",
            field=f"data.image_options.{name}",
        )
        for name in data.image_options
        if name not in known
    ]
    if problems:
        raise ModelError(problems)
    if data.image_options:
        images = AutoImageProcessor.from_pretrained(path, **ours, **data.image_options)
    family, problems = _FAMILIES[config.model_type](images, config, path)
    token_id = config.image_token_id
    if tokenizer.convert_tokens_to_ids(family.token) != token_id:
        what = f"the tokenizer does not give {family.token} the id {token_id}, by which the model knows an image"
        field = "model.tokenizer_path" if model.tokenizer_path else "model.path"
        problems.append(Problem(what, fix="use the model's own tokenizer", field=field))
    if problems:
        raise ModelError(problems)
    return ImageProcessor(images, family, data.image_cache_mib * 2**20)


# Keys that data.image_options may set: the size at which the model reads an image. The others are part of the model.
_OPTIONS = {"min_pixels", "max_pixels", "size", "do_image_splitting"}


def _annotations(kwargs: type) -> set[str]:
    return {name for base in (kwargs, *getattr(kwargs, "__orig_bases__", ())) for name in base.__annotations__}


def _qwen(images: Any, config: PretrainedConfig, path: str) -> tuple[Family, list[Problem]]:
    vision = config.vision_config
    wanted = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    made = (images.patch_size, images.merge_size, images.temporal_patch_size)
    return QwenFamily(images), [] if made == wanted else [_misfit(path, "patch, merge and temporal size", made, wanted)]


def _smolvlm(images: Any, config: PretrainedConfig, path: str) -> tuple[Family, list[Problem]]:
    vision = config.vision_config
    tile = images.max_image_size["longest_edge"]
    problems = [] if tile == vision.image_size else [_misfit(path, "image size", tile, vision.image_size)]
    if not dict(images.size).get("longest_edge"):
        what = f"the image processor of {path} has size {dict(images.size)}; longest_edge is needed"
        problems.append(Problem(what, field="data.image_options.size"))
    return SmolFamily(images, (vision.image_size // vision.patch_size // config.scale_factor) ** 2), problems


def _misfit(path: str, what: str, made: object, wanted: object) -> Problem:
    text = f"the image processor of {path} has {what} {made}, and its model {wanted}"
    return Problem(text, fix="use the preprocessor_config.json that was published with the model", field="model.path")


_FAMILIES = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "smolvlm": _smolvlm,
}
