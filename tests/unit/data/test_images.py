"""Images of dataset rows: the forms they are given in, their places in messages, and everything that can be wrong with them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from posttrain.config.data import DataConfig
from posttrain.data.images import ImageRules, decode
from posttrain.data.readers import check_files, read_rows
from posttrain.errors import DataError


def encoded(width=6, height=4, form="PNG", mode="RGB", color=(255, 0, 0), **options):
    file = BytesIO()
    Image.new(mode, (width, height), color).save(file, form, **options)
    return file.getvalue()


def png_that_says(width, height):
    """A PNG of 70 bytes whose header claims a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def url(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


PNG = encoded()
QUESTION = "<image>What is it?"


def row(images, prompt=QUESTION, **columns):
    return {"prompt": prompt, "data_source": "shapes", "answer": "1", "images": images, **columns}


def written(folder, record):
    """A parquet file for bytes, else JSON lines."""
    try:
        text = json.dumps(record)
    except TypeError:
        pq.write_table(pa.Table.from_pylist([record]), folder / "train.parquet")
        return folder / "train.parquet"
    (folder / "train.jsonl").write_text(text + "\n", encoding="utf-8")
    return folder / "train.jsonl"


def rows_of(file, **settings):
    data = DataConfig(train_files=[str(file)], **settings)
    return list(read_rows(file, data, images=ImageRules.of(data)))


# ------------------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize(
    "images",
    [
        "red.png",
        ["red.png"],
        "{folder}/red.png",
        "file://{folder}/red.png",
        [{"path": "red.png", "bytes": None}],
        [{"bytes": PNG, "path": None}],
        [{"bytes": PNG, "path": "not-there.png"}],  # a dataset that holds its files names where they came from
        PNG,
        [PNG],
        url(PNG),
        [url(PNG, "image/png;charset=utf-8")],
        [{"type": "image", "image": url(PNG)}],
        [{"type": "image_url", "image_url": {"url": url(PNG), "detail": "low"}}],
        '["red.png"]',  # as a csv cell holds a list
    ],
)
def test_every_form_of_an_image_gives_its_file(tmp_path, images):
    (tmp_path / "red.png").write_bytes(PNG)
    images = images.replace("{folder}", str(tmp_path)) if isinstance(images, str) else images

    (found,) = rows_of(written(tmp_path, row(images)))

    assert [(image.content, image.width, image.height) for image in found.images] == [(PNG, 6, 4)]
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    assert found.messages == [{"role": "user", "content": content}]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_every_format_decodes_to_rgb(tmp_path, form):
    (found,) = rows_of(written(tmp_path, row([encoded(form=form, mode="L", color=200)])))

    picture = decode(found.images[0].content)

    assert (picture.mode, picture.size) == ("RGB", (6, 4))
    assert all(abs(value - 200) <= 2 for value in picture.getpixel((3, 2)))


def test_images_go_to_their_places_in_order(tmp_path):
    """Four places: two in texts, one part without an image of its own, and one with, which takes none from the column."""
    one, two, three, own = (encoded(color=(shade, 0, 0)) for shade in (10, 20, 30, 40))
    parts = [
        {"type": "image"},
        {"type": "text", "text": "and <image>"},
        {"type": "image", "image": url(own)},
    ]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image>first"}]
    messages += [{"role": "user", "content": parts}]

    (found,) = rows_of(written(tmp_path, row([url(one), url(two), url(three)], messages)))

    assert [image.content for image in found.images] == [one, two, three, own]
    assert [message["content"] for message in found.messages] == [
        "Look.",
        [{"type": "image"}, {"type": "text", "text": "first"}],
        [{"type": "image"}, {"type": "text", "text": "and "}, {"type": "image"}, {"type": "image"}],
    ]


def test_without_the_column_a_placeholder_is_text(tmp_path):
    plain = {"prompt": "Close the <image> tag.", "data_source": "html", "answer": "1"}
    (found,) = rows_of(written(tmp_path, plain))
    assert (found.messages[0]["content"], found.images) == ("Close the <image> tag.", ())

    (found,) = rows_of(written(tmp_path, row(["not-there.png"])), image_column=None)
    assert (found.messages[0]["content"], found.images) == (QUESTION, ())


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_a_row_without_images_is_text(tmp_path, nothing):
    (found,) = rows_of(written(tmp_path, row(nothing, "What is it?")))
    assert (found.messages, found.images) == ([{"role": "user", "content": "What is it?"}], ())


def test_parts_of_text_alone_become_one_text(tmp_path):
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    (found,) = rows_of(written(tmp_path, row(None, [{"role": "user", "content": parts}])))
    assert found.messages == [{"role": "user", "content": "What is it?"}]


def test_images_are_not_handed_to_rewards(tmp_path):
    """With all columns asked for, the bytes of the images would travel to every reward worker."""
    (found,) = rows_of(written(tmp_path, row([PNG])), extra_columns=["*"])
    assert set(found.extra_info) == {"data_source", "answer"}


# ------------------------------------------------------------------------------------------------ what is refused

CUT = encoded(64, 64, color=(1, 2, 3))[:-40]
NOISE = b"\x00\x01" * 50
ANIMATION = BytesIO()
Image.new("RGB", (4, 4), "red").save(ANIMATION, "GIF", save_all=True, append_images=[Image.new("RGB", (4, 4), "blue")])

MALFORMED = {
    "a file that is not there": (row(["gone.png"]), "that is not there: no file", "images"),
    "an empty list with a placeholder": (row([]), "holds 0 images, and the prompt has 1 place", "images"),
    "a null with a placeholder": (row(None), "holds 0 images, and the prompt has 1 place", "images"),
    "more images than places": (row([PNG, PNG]), "holds 2 images, and the prompt has 1 place", "images"),
    "more places than images": (row([PNG], "<image><image>?"), "holds 1 image, and the prompt has 2 places", "images"),
    "an image without a place": (row([PNG], "What is it?"), "holds 1 image, and the prompt has 0 places", "images"),
    "a corrupt file": (row([CUT]), "image 0 that is corrupt (", "images"),
    "the second is corrupt": (row([PNG, CUT], "<image><image>"), "image 1 that is corrupt (", "images"),
    "no image at all": (row([NOISE]), "image 0 that is 100 bytes of no known kind; an image (PNG, JPEG", "images"),
    "no bytes": (row([b""]), "image 0 that is empty: 0 bytes", "images"),
    "a decompression bomb": (row([png_that_says(60000, 60000)]), "that is a decompression bomb", "images"),
    "a giant image": (
        row([png_that_says(12000, 8000)]),
        "12000 x 8000 = 96000000 pixels, more than 89478485; make it smaller, or raise data.max_image_pixels",
        "images",
    ),
    "a web address": (
        row(["https://x.org/a.png"]),
        "downloads are not supported: give the path of a local file",
        "images",
    ),
    "a bucket": (row(["s3://bucket/a.png"]), "downloads are not supported", "images"),
    "a data URL of text": (row([url(b"hello", "text/plain")]), "is a data URL of text/plain", "images"),
    "broken base64": (row(["data:image/png;base64,%%%"]), "is a data URL that is not base64", "images"),
    "a data URL without base64": (row(["data:image/svg+xml,<svg/>"]), "is a data URL that is not base64", "images"),
    "a drawing that is a program": (row([b"<svg onload='x()'/>"]), "is an SVG drawing, which is a program", "images"),
    "a video file": (row([b"\x00\x00\x00\x18ftypmp42" + NOISE]), "that is a video; an image", "images"),
    "an audio file": (row([b"RIFF\x00\x00\x00\x00WAVEfmt "]), "that is audio; an image", "images"),
    "a PDF": (row([b"%PDF-1.7 ..."]), "that is a PDF file", "images"),
    "an unsupported format": (row([encoded(form="TIFF")]), "of no known kind; an image (PNG, JPEG, WEBP", "images"),
    "an animation": (row([ANIMATION.getvalue()]), "that is an animation; a still image is expected", "images"),
    "a number": (row([7]), "image 0 that is int; bytes, a path, a data URL", "images"),
    "a null in the list": (row([None, "a.png"], "<image><image>"), "image 0 that is nothing (null)", "images"),
    "an empty mapping": (row([{"path": None}]), "is a mapping without an image (one of bytes, path", "images"),
    "too deep": (row([{"image": {"url": {"url": {}}}}]), "is a mapping in a mapping in a mapping", "images"),
    "a size of its own": (
        row([{"image": url(PNG), "max_pixels": 9}]),
        "has the unknown key max_pixels (known: bytes, path, image, image_url, url); sizes are set for all images",
        "images",
    ),
    "too many": (row(["a.png"] * 65), "holds 65 images; a prompt may have 64", "images"),
    "a broken csv list": (row("[red.png]"), "holds images that are not JSON", "images"),
    "a null byte in a path": (row(["a\0b.png"]), "cannot be read", "images"),
    "a video column": (row([PNG], videos=["a.mp4"]), "holds a video; this version reads still images only", "videos"),
    "a video part": (
        row(None, [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]),
        "holds part 0 of message 0 of type video; this version reads texts and still images only",
        "images",
    ),
    "an audio part": (
        row(None, [{"role": "user", "content": [{"type": "input_audio"}]}]),
        "of type input_audio; this version reads texts and still images only",
        "images",
    ),
    "an unknown part": (
        row(None, [{"role": "user", "content": ["What?"]}]),
        "holds part 0 of message 0 of type None; text and image are known",
        "images",
    ),
    "a text part without text": (
        row(None, [{"role": "user", "content": [{"type": "text"}]}]),
        "holds no text in part 0 of message 0",
        "images",
    ),
    "a part's own file is gone": (
        row(None, [{"role": "user", "content": [{"type": "image", "path": "gone.png"}]}]),
        "holds an image in message 0 that is not there",
        "images",
    ),
}


@pytest.mark.parametrize("case", list(MALFORMED))
def test_malformed_rows_are_told_with_row_and_column(tmp_path, case):
    record, what, column = MALFORMED[case]
    file = written(tmp_path, record)

    with pytest.raises(DataError) as error:
        rows_of(file)

    (problem,) = error.value.problems
    assert problem.what.startswith(f"row 0 of {file.name}: column {column} ")
    assert what in problem.what
    assert problem.field == {"images": "data.image_column", "videos": "data.video_column"}[column]
    assert [found.what for found in check_files(DataConfig(train_files=[str(file)]))] == [problem.what]


def test_the_limit_holds_before_anything_is_decoded(tmp_path, monkeypatch):
    """6 x 4 = 24 pixels: 24 are allowed, and with 23 the decoder is never called."""
    file = written(tmp_path, row([PNG]))
    assert len(rows_of(file, max_image_pixels=24)[0].images) == 1

    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DataError, match="6 x 4 = 24 pixels, more than 23"):
        rows_of(file, max_image_pixels=23)


def test_all_bad_rows_of_a_file_are_told_together(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row([name])) + "\n" for name in ("a.png", url(PNG), "b.png")))

    with pytest.raises(DataError) as error:
        rows_of(file)

    assert [problem.what[:23] for problem in error.value.problems] == [
        "row 0 of train.jsonl: c",
        "row 2 of train.jsonl: c",
    ]


def test_a_column_that_is_named_must_be_there(tmp_path):
    file = written(tmp_path, row([url(PNG)]))
    with pytest.raises(DataError, match=r"did you mean data\.image_column=images"):
        rows_of(file, image_column="image")
