"""Images of a dataset row: found in their column, read, checked, and placed in the messages.

Torch-free. Files are untrusted: the size is taken from the header and checked before decoding, only the formats below are
tried, and nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from PIL import Image, UnidentifiedImageError

from posttrain.config.images import ImageSettings
from posttrain.libraries import json_text
from posttrain.records.images import PromptImages

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # of one picture
PLACEHOLDER = "<image>"
# Supported values of model_type
VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm")
A_VISION_MODEL = "choose a Qwen2-VL, Qwen2.5-VL, Qwen3-VL or SmolVLM model"
CHOOSE_A_VISION_MODEL = f"{A_VISION_MODEL}, or set data.image_column=null to leave the images out"
MAX_IMAGES = 64  # per prompt

_SOURCES = ("bytes", "path", "image", "image_url", "url")  # keys of a mapping that holds an image
_DATA_URL = re.compile(r"data:(?P<kind>[\w.+-]*/?[\w.+-]*)(?:;[\w=-]+)*?;base64,", re.IGNORECASE)
_OTHER_MEDIA = (  # signatures of other files: offset, bytes, kind
    (4, b"ftyp", "a video"),
    (0, b"\x1aE\xdf\xa3", "a video"),
    (8, b"AVI ", "a video"),
    (8, b"WAVE", "audio"),
    (0, b"ID3", "audio"),
    (0, b"fLaC", "audio"),
    (0, b"OggS", "audio"),
    (0, b"%PDF", "a PDF file"),
    (0, b"<svg", "an SVG drawing, which is a program"),
    (0, b"<?xml", "an XML file"),
)


class BadImage(Exception):
    """A cell holds no valid images; caught where its row and column are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """Columns of images and videos (None: not read), base folder of paths (None: the dataset's), and the largest image."""

    column: str | None
    video_column: str | None
    folder: Path | None
    max_pixels: int

    @classmethod
    def of(cls, data: ImageSettings) -> ImageRules:
        folder = None if data.image_folder is None else Path(data.image_folder).expanduser()
        return cls(
            column=data.image_column,
            video_column=data.video_column,
            folder=folder,
            max_pixels=data.max_image_pixels,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """An encoded image that was checked when it was read."""

    content: bytes
    width: int  # pixels
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


class PromptImageReader(Protocol):
    """Prepares the images of prompts for a model (models.processors.ImageProcessor)."""

    @property
    def token(self) -> str:
        """The token that stands for an image, and for each part of it that the model reads."""
        ...

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Replace every image token of a templated prompt with the tokens that the model reads for that image."""
        ...

    def prompt_images(self, files: Sequence[ImageFile]) -> PromptImages:
        """Return the images of a prompt, whose features are computed on first use."""
        ...


def read_images(value: Any, folder: Path, max_pixels: int) -> list[ImageFile]:
    """Read the images of a cell: one or a list, each as bytes, a path, a data URL, or a mapping that holds one of them.

    Args: ``folder`` is the base of relative paths; ``max_pixels`` is the largest width x height.
    Raises: BadImage for the first invalid image, with its number if there are several.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):  # a list in a csv cell
        try:
            value = json_text.loads(value)
        except json.JSONDecodeError as error:
            raise BadImage(f"holds images that are not JSON: {error.msg} at character {error.pos}") from error
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        return [_read(value, folder, max_pixels, "an image")]
    if len(value) > MAX_IMAGES:
        raise BadImage(f"holds {len(value)} images; a prompt may have {MAX_IMAGES}")
    return [_read(each, folder, max_pixels, f"image {number}") for number, each in enumerate(value)]


def place_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[ImageFile], folder: Path, max_pixels: int, *, column: bool
) -> tuple[list[dict[str, Any]], tuple[ImageFile, ...]]:
    """Return messages with typed parts, {"type": "image"} in place of an image, and the images in that order.

    An image part that holds its own image keeps it; other image parts, and ``<image>`` in texts, take those of the column in
    turn. A message without images is one text. Without a ``column``, ``<image>`` in a text is text.

    Raises: BadImage when the numbers of places and images differ, or a part is of another kind.
    """
    found: list[ImageFile] = []
    rest = list(images)
    places = 0  # filled from the column

    def take() -> None:
        nonlocal places
        places += 1
        if rest:
            found.append(rest.pop(0))

    placed = []
    for index, message in enumerate(messages):
        parts: list[dict[str, Any]] = []
        for part in _parts(message["content"], index):
            if isinstance(part, str):
                for piece in re.split(f"({PLACEHOLDER})", part) if column else [part]:
                    if piece == PLACEHOLDER and column:
                        take()
                        parts.append({"type": "image"})
                    elif piece:
                        parts.append({"type": "text", "text": piece})
            else:
                if own := _own(part):
                    found.append(_read(own, folder, max_pixels, f"an image in message {index}"))
                else:
                    take()
                parts.append({"type": "image"})
        text_only = all(part["type"] == "text" for part in parts)
        content = "".join(part["text"] for part in parts) if text_only else parts
        placed.append({**message, "content": content})
    if places != len(images):
        raise BadImage(
            f"holds {_count(len(images), 'image')}, and the prompt has {_count(places, 'place')} for "
            f"{'it' if places == 1 else 'them'} ({PLACEHOLDER} in a text, or a part of type image); they must be as many"
        )
    return placed, tuple(found)


def decode(content: bytes) -> Image.Image:
    """Decode the content of a file that ``read_images`` has checked, to RGB."""
    with Image.open(BytesIO(content), formats=FORMATS) as image:
        return image.convert("RGB")


def refuse_videos(value: Any) -> None:
    """Raises: BadImage when a cell holds a video."""
    if value is not None and value != "" and value != []:
        raise BadImage("holds a video; this version reads still images only, so take the row out or give its frames")


# ------------------------------------------------------------------------------------------------ one image


def _read(value: Any, folder: Path, max_pixels: int, called: str) -> ImageFile:
    try:
        content = _content(value, folder)
        width, height = _size(content, max_pixels)
        _check_decodes(content)
    except BadImage as error:
        raise BadImage(f"holds {called} that {error}") from error
    return ImageFile(content=content, width=width, height=height)


def _content(value: Any, folder: Path, *, inner: bool = False) -> bytes:
    """Return the encoded file that a value is or names; ``inner`` values come from a mapping, and may be one more mapping."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not value:
            raise BadImage("is empty: 0 bytes")
        return bytes(value)
    if isinstance(value, str):
        return _named(value, folder)
    if isinstance(value, Mapping):
        there = {key: each for key, each in value.items() if each is not None and key != "type"}
        if unknown := sorted(set(there) - set(_SOURCES) - {"detail"}):
            fix = "sizes are set for all images, with data.image_options"
            raise BadImage(f"has the unknown key {unknown[0]} (known: {', '.join(_SOURCES)}); {fix}")
        # a dataset keeps bytes and the path they came from
        source = next((there[key] for key in _SOURCES if key in there), None)
        if source is None:
            raise BadImage(f"is a mapping without an image (one of {', '.join(_SOURCES)})")
        if inner and isinstance(source, Mapping):
            raise BadImage("is a mapping in a mapping in a mapping")
        return _content(source, folder, inner=True)
    if value is None:
        raise BadImage("is nothing (null)")
    raise BadImage(f"is {type(value).__name__}; bytes, a path, a data URL, or a mapping with bytes or path is expected")


def _named(name: str, folder: Path) -> bytes:
    """Read the file of a path or data URL."""
    if match := _DATA_URL.match(name):
        if match["kind"] and not match["kind"].lower().startswith("image"):
            raise BadImage(f"is a data URL of {match['kind']}; an image is expected")
        try:
            return base64.b64decode(name[match.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadImage(f"is a data URL that is not base64: {error}") from error
    if name.startswith("data:"):
        raise BadImage("is a data URL that is not base64; write data:image/png;base64,…")
    scheme, mark, rest = name.partition("://")
    if mark and scheme.lower() != "file":
        raise BadImage(
            f"is at {_short(name)}; downloads are not supported: give the path of a local file, or its bytes"
        )
    path = Path(rest if mark else name).expanduser()
    file = path if path.is_absolute() else folder / path
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # reading a device or a pipe may never end
            raise BadImage(f"is no file: {_short(str(file))}")
        return file.read_bytes()
    except FileNotFoundError as error:
        raise BadImage(f"is not there: no file {_short(str(file))}") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise BadImage(f"cannot be read: {_short(str(error))}") from error


def _size(content: bytes, max_pixels: int) -> tuple[int, int]:
    """Return width and height from the header, without decoding."""
    try:
        with warnings.catch_warnings():
            # posttrain has its own limit, checked below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
                animated = bool(getattr(image, "is_animated", False))
    except Image.DecompressionBombError as error:  # PIL's own limit, at most twice its setting
        raise BadImage(f"is a decompression bomb: its header says more than {max_pixels} pixels") from error
    except UnidentifiedImageError as error:
        raise BadImage(_no_image(content)) from error
    except Exception as error:  # a malicious header may fail in any way in PIL's plugins
        raise BadImage(f"has a header that cannot be read ({type(error).__name__}: {_short(str(error))})") from error
    if width * height > max_pixels:
        raise BadImage(
            f"has {width} x {height} = {width * height} pixels, more than {max_pixels}; make it smaller, or raise "
            "data.max_image_pixels"
        )
    if animated:
        raise BadImage("is an animation; a still image is expected")
    return width, height


def _check_decodes(content: bytes) -> None:
    """Decode once, so that a corrupt file is reported with its row before anything starts."""
    try:
        decode(content)
    except Exception as error:  # PIL's decoders, as above
        raise BadImage(f"is corrupt ({type(error).__name__}: {_short(str(error))})") from error


def _no_image(content: bytes) -> str:
    known = f"an image ({', '.join(FORMATS)}) is expected"
    for offset, magic, kind in _OTHER_MEDIA:
        if content.lstrip()[offset:].lower().startswith(magic.lower()):
            return f"is {kind}; {known}"
    return f"is {len(content)} bytes of no known kind; {known}"


# ------------------------------------------------------------------------------------------------ messages


def _parts(content: Any, index: int) -> Iterator[str | Mapping[str, Any]]:
    """Yield the texts and the image parts of a message."""
    if isinstance(content, str):
        yield content
        return
    for number, part in enumerate(content):
        place = f"part {number} of message {index}"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise BadImage(f"holds no text in {place}, whose type is text")
            yield part["text"]
        elif kind in ("image", "image_url"):
            yield part
        elif kind is not None and ("video" in str(kind) or "audio" in str(kind)):
            raise BadImage(f"holds {place} of type {kind}; this version reads texts and still images only")
        else:
            raise BadImage(f"holds {place} of type {kind!r}; text and image are known")


def _own(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an image part besides its type."""
    return {key: value for key, value in part.items() if key not in ("type", "text", "detail") and value is not None}


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"


def _short(text: str) -> str:
    return f"{text[:200]}…" if len(text) > 200 else text
