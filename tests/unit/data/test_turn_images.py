"""Images in an environment's messages: placed for the template, read once, and refused by name."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from posttrain.data.images import ImageFile
from posttrain.data.turn_images import TurnImages
from posttrain.errors import DataError
from posttrain.records.images import PromptImages


class Reader:
    """Marks every image by its size."""

    token = "<image>"

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        for width, height in sizes:
            text = text.replace("<image>", f"[{width}x{height}]", 1)
        return text

    def prompt_images(self, files: Sequence[ImageFile]) -> PromptImages:
        raise AssertionError("no features are needed here")


def picture(width: int, height: int) -> dict[str, Any]:
    file = BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}


def seen(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": list(parts)}]


def test_images_are_placed_and_expanded_in_order() -> None:
    images = TurnImages(Reader())
    in_openai_form = {"type": "image_url", "image_url": {"url": picture(5, 4)["image"]}}
    messages = seen(picture(3, 2), {"type": "text", "text": "and"}, in_openai_form)
    places = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    assert [message["content"] for message in images.placed(messages)] == [[{"type": "text", "text": "Look."}], places]
    assert images.expanded("<image> and <image>", messages) == "[3x2] and [5x4]"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (None, "not a data URL"),
        ({"url": "x"}, "not a data URL"),  # which no cache can hold
        ("/etc/hostname", "not a data URL"),
        ("data:text/plain,hello", "not base64"),
        ("data:image/png;base64,!", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "no known kind"),
    ],
)
def test_what_is_no_image_is_refused(source: object, told: str) -> None:
    with pytest.raises(DataError, match=told):
        TurnImages(Reader()).expanded("<image>", seen({"type": "image", "image": source}))


def test_a_model_that_reads_text_only_is_named() -> None:
    with pytest.raises(DataError, match="the model reads text only"):
        TurnImages().placed(seen(picture(1, 1)))
