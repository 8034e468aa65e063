"""Pictures of samples on the page: small PNG files of the run folder, within a bound, and nothing else."""

from __future__ import annotations

import base64
import json
from io import BytesIO

import pytest
from PIL import Image

from posttrain.report import embedded, pictures
from posttrain.report.contents import page_data
from posttrain.report.html import render
from posttrain.report.pictures import picture_files, read_picture
from posttrain.report.read import read_run


def png(width=4, height=3, color="red"):
    file = BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


NAME = f"samples/images/{'a' * 32}.png"


def run_with(folder, images, files):
    (folder / "samples" / "images").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "config.yaml").write_text("run: {name: seen}\n")
    (folder / "run.json").write_text("{}")
    row = {"sample_id": "a/0", "prompt": "?", "response": "!", "reward": 1.0, "images": images}
    (folder / "samples" / "step_1.jsonl").write_text(json.dumps(row) + "\n")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return read_run(folder)


def test_a_page_carries_pictures_as_data_urls_and_may_show_them(tmp_path):
    content = png()
    run = run_with(tmp_path, [{"file": NAME, "width": 40, "height": 30}], {NAME: content})

    data = page_data([run])

    assert data["pictures"] == {NAME: "data:image/png;base64," + base64.b64encode(content).decode()}
    assert data["samples"][0]["images"] == [{"file": NAME, "width": 40, "height": 30}]
    assert data["left_out"] == []
    page = render(data, "seen")
    assert "img-src data:;" in page and data["pictures"][NAME] in page


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"<svg onload='alert(1)'/>", "not a PNG"),
        (png()[:20], "cut in its header"),
        (png(1025, 1), "too large to draw"),
        (png() + b"\0" * pictures.MAX_BYTES, "too large a file"),
        (None, "not there"),
    ],
)
def test_other_files_are_not_put_on_the_page(tmp_path, content, why):
    run = run_with(tmp_path, [{"file": NAME}], {} if content is None else {NAME: content})
    data = page_data([run])
    assert data["pictures"] == {}, why
    assert data["left_out"][0].startswith("1 image of samples are not on this page.")


@pytest.mark.parametrize(
    "images",
    ["x", [7], [{"file": "/etc/passwd"}], [{"file": "samples/images/../../../secret.png"}], [{"file": [NAME]}], {}],
)
def test_no_other_names_are_looked_at(images):
    assert picture_files({"images": images}) == []


def test_links_are_not_followed(tmp_path):
    (tmp_path / "samples" / "images").mkdir(parents=True)
    (tmp_path / "elsewhere.png").write_bytes(png())
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere.png")
    assert read_picture(tmp_path, NAME) is None


def test_pictures_have_a_bound(tmp_path, monkeypatch):
    names = [f"samples/images/{letter * 32}.png" for letter in "ab"]
    run = run_with(tmp_path, [{"file": name} for name in names], {name: png() for name in names})
    one = len("data:image/png;base64,") + len(base64.b64encode(png()))
    monkeypatch.setattr(embedded, "MAX_PICTURE_BYTES", one)

    data = page_data([run])

    assert list(data["pictures"]) == names[:1]
    assert data["left_out"][0].startswith("1 image of samples are not on this page.")
