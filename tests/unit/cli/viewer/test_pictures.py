"""Images in the terminal: half blocks, an upper and a lower pixel in each."""

from __future__ import annotations

from io import BytesIO

from PIL import Image

from posttrain.cli.viewer.pages import sample_page
from posttrain.cli.viewer.pictures import pictures

NAME = f"samples/images/{'a' * 32}.png"


def folder_with(folder, content):
    (folder / NAME).parent.mkdir(parents=True)
    (folder / NAME).write_bytes(content)
    return folder


def picture(width, height):
    image = Image.new("RGB", (width, height), (255, 0, 0))
    image.putpixel((0, 1), (0, 0, 255))
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_two_by_three_pixels_are_two_lines_of_two_characters(tmp_path):
    """The last line has no lower pixels of its own, and repeats the upper ones."""
    drawn = pictures({"images": [{"file": NAME}]}, folder_with(tmp_path, picture(2, 3)))
    assert drawn.plain == f"{NAME}\n▀▀\n▀▀\n"
    styles = [str(span.style) for span in drawn.spans]
    red, blue = "rgb(255,0,0)", "rgb(0,0,255)"
    assert styles == [f"{red} on {blue}", f"{red} on {red}", f"{red} on {red}", f"{red} on {red}"]


def test_a_large_picture_is_scaled_down(tmp_path):
    drawn = pictures({"images": [{"file": NAME}]}, folder_with(tmp_path, picture(480, 240)))
    assert [len(line) for line in drawn.plain.splitlines()[1:]] == [48] * 12


def test_what_cannot_be_drawn_is_said(tmp_path):
    cut = picture(90, 90)[:60]
    assert "it cannot be drawn" in pictures({"images": [{"file": NAME}]}, folder_with(tmp_path, cut)).plain
    assert "which is not there" in pictures({"images": [{"file": NAME.replace("a" * 32, "b" * 32)}]}, tmp_path).plain
    many = {"images": [{"file": NAME.replace("a" * 32, digit * 32)} for digit in "012345"]}
    assert pictures(many, tmp_path).plain.endswith("and 2 more\n")


def test_the_page_of_a_sample_shows_them(tmp_path):
    row = {"prompt": "<image>?", "response": "!", "images": [{"file": NAME}]}
    assert "▀▀" in sample_page(row, folder_with(tmp_path, picture(2, 2))).plain
