"""Images in the messages of an environment, for vision models.

A part ``{"type": "image", "image": "data:image/png;base64,..."}`` of a message, or OpenAI's ``{"type": "image_url",
"image_url": {"url": ...}}``, holds its image as text, so that messages can cross processes. Paths are not read: an environment
may repeat text of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.data.images import A_VISION_MODEL, BadImage, ImageFile, PromptImageReader, read_images
from posttrain.errors import DataError, Problem, UnreadImages
from posttrain.interfaces.env import Message
from posttrain.records.images import PromptImages

IMAGES = ("image", "image_url")  # types of parts; the image is under the same key
TEXTS_INSTEAD = f"{A_VISION_MODEL}, or an environment of texts"
KEPT_FILES = 512  # checked images that are remembered: every turn renders the whole conversation


@dataclass(frozen=True, slots=True)
class TurnImages:
    """Places the images of conversations; without a ``reader``, that of a vision model, images are refused."""

    reader: PromptImageReader | None = None
    max_pixels: int = 89_478_485

    def placed(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose image parts are places alone, in the form that templates of vision models accept.

        Raises: UnreadImages for a model of text.
        """
        if self.reader is None:
            if any(_sources(messages)):
                what = "the environment shows an image, and the model reads text only"
                raise UnreadImages(Problem(what, fix=TEXTS_INSTEAD))
            return list(messages)
        return [{**message, "content": _parts(message.get("content"))} for message in messages]

    def expanded(self, text: str, messages: Sequence[Message]) -> str:
        """Replace the image tokens of rendered messages with those that the model reads. Raises: DataError."""
        if self.reader is None:
            return text
        return self.reader.expand(text, [(file.width, file.height) for file in self._files(messages)])

    def of(self, messages: Sequence[Message]) -> PromptImages | None:
        """Return the images of a conversation; None without any. Raises: DataError for one that cannot be read."""
        files = self._files(messages) if self.reader is not None else ()
        return self.reader.prompt_images(files) if self.reader is not None and files else None

    def _files(self, messages: Sequence[Message]) -> tuple[ImageFile, ...]:
        try:
            return tuple(_file(_data_url(source), self.max_pixels) for source in _sources(messages))
        except BadImage as error:
            raise DataError(Problem(f"the environment {error}")) from error


def _sources(messages: Sequence[Message]) -> Iterator[Any]:
    """Yield what the image parts of all messages hold."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in IMAGES:
                held = part.get(str(part["type"]))
                yield held.get("url") if isinstance(held, Mapping) else held


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    return [{"type": "image"} if isinstance(part, Mapping) and part.get("type") in IMAGES else part for part in content]


def _data_url(source: object) -> str:
    if not isinstance(source, str) or not source.startswith("data:"):
        raise BadImage("shows an image that is not a data URL; write data:image/png;base64,...")
    return source


@lru_cache(maxsize=KEPT_FILES)
def _file(source: str, max_pixels: int) -> ImageFile:
    (file,) = read_images(source, Path(), max_pixels)
    return file
