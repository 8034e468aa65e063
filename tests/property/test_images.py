"""Whatever bytes a dataset holds for an image, the answer is an image that decodes, or one sentence about what is wrong."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from posttrain.data.images import FORMATS, BadImage, decode, read_images


def encoded(form: str) -> bytes:
    file = BytesIO()
    Image.radial_gradient("L").resize((24, 16)).convert("RGB").save(file, form)
    return file.getvalue()


FILES = [encoded(form) for form in FORMATS]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An image file with some bytes changed, and perhaps its end cut off or put double."""
    content = bytearray(draw(st.sampled_from(FILES)))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6)):
        content[place] = byte
    end = draw(st.integers(0, len(content)))
    return bytes(draw(st.sampled_from([content, content[:end], content + content[end:]])))


@settings(max_examples=300, deadline=None)
@given(st.one_of(damaged(), st.binary(max_size=200)))
def test_bytes_are_an_image_or_a_sentence(content: bytes) -> None:
    try:
        [image] = read_images([content], Path("/nowhere"), 10_000)
    except BadImage as error:
        assert str(error).startswith("holds image 0 that ") and "\n" not in str(error) and len(str(error)) < 600
    else:
        assert decode(image.content).size == (image.width, image.height) and image.pixels <= 10_000


KEYS = st.text(max_size=8) | st.sampled_from(["bytes", "path", "image", "url", "type"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_values_of_any_kind_are_answered(value: object) -> None:
    try:
        assert read_images(value, Path("/nowhere"), 10_000) == []
    except BadImage as error:
        assert str(error).startswith("holds ")
