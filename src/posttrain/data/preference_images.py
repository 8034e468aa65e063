"""Images of a preference row: read from their column, checked, and placed in the messages of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config.tune import TuneConfig, TuneDataConfig
from posttrain.data.cells import BadCell, Message
from posttrain.data.images import PLACEHOLDER, BadImage, ImageFile, place_images, read_images, refuse_videos
from posttrain.data.record_files import Record, first_record
from posttrain.data.sft_rows import image_column


def unread_images(record: Record, data: TuneDataConfig) -> str | None:
    """Return the column of images that is not read, None without one; data.image_column=null leaves all of them out."""
    column = image_column(record)
    return None if column == data.image_column or data.image_column is None else column


def first_with_images(config: TuneConfig) -> Record | None:
    """Return the first row of the files if it has images that are read; None where a file cannot be opened, which is reported
    elsewhere."""
    column = config.data.image_column
    for path in config.data.train_files[:1]:
        record, _ = first_record(path, "data.train_files")
        if record is not None and column is not None and record.get(column) not in (None, "", []):
            return record
    return None


def with_images(
    prompt: list[Message], record: Record, data: TuneDataConfig, folder: Path
) -> tuple[list[Message], tuple[ImageFile, ...]]:
    """Place a row's images in its prompt. Where the prompt has no place for any of them, they come before the text of its first
    user message, as TRL puts them.

    Args: folder, that of the dataset file, where relative paths begin unless data.image_folder names another.
    Raises: BadImage.
    """
    column = data.image_column
    if column is None:
        return prompt, ()
    refuse_videos(record.get(data.video_column) if data.video_column else None)
    base = folder if data.image_folder is None else Path(data.image_folder).expanduser()
    found = read_images(record.get(column), base, data.max_image_pixels)
    if found and not any(map(_has_places, prompt)):
        prompt = _before_the_question(prompt, len(found))
    return place_images(prompt, found, base, data.max_image_pixels, column=column in record)


def only_texts(side: Sequence[Message]) -> None:
    """Raises: BadCell where a message of a completion has a part that is no text."""
    for message in side:
        if isinstance(parts := message.get("content"), list):
            kinds = [part.get("type") if isinstance(part, dict) else "text" for part in parts]
            odd = next((kind for kind in kinds if kind != "text"), "text")
            raise BadCell(f"holds a part of type {odd}; completions are texts, and images belong to the prompt")


def _has_places(message: Message) -> bool:
    content: Any = message.get("content")
    if isinstance(content, str):
        return PLACEHOLDER in content
    return any(isinstance(part, dict) and part.get("type") != "text" for part in content or ())


def _before_the_question(prompt: list[Message], images: int) -> list[Message]:
    asked = next((index for index, message in enumerate(prompt) if message["role"] == "user"), None)
    if asked is None:
        raise BadImage("holds images, and the prompt has no message of the user to place them in")
    parts = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt[asked]["content"]}]
    return [{**message, "content": parts} if index == asked else message for index, message in enumerate(prompt)]
