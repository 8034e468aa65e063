"""Samples name their images, and the run folder holds each once, drawn anew."""

from __future__ import annotations

import json
from io import BytesIO

from PIL import Image, PngImagePlugin

from posttrain.records.images import PromptImages, hash_of_files
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, ScoredGroup, StopReason, Trajectory, TrajectoryGroup
from posttrain.run import sample_images
from posttrain.run.samples import write_samples


def encoded(width, height, color="red", form="PNG", **options):
    file = BytesIO()
    Image.new("RGB", (width, height), color).save(file, form, **options)
    return file.getvalue()


def images(*files):
    return PromptImages(files=files, features={}, content_hash=hash_of_files(files))


def scored(found, samples=2):
    made = Trajectory(
        sample_id="a/0", token_ids=(7,), logprobs=(-1.0,), text="r", stop_reason=StopReason.EOS, policy_version=0
    )
    prompt = Prompt(prompt_id="a", token_ids=(1,), text="<image>?", data_source="s", images=found)
    group = TrajectoryGroup(prompt=prompt, trajectories=(made,) * samples)
    return ScoredGroup(group=group, outcomes=(Reward(1.0),) * samples)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_sample_names_its_images_and_files_are_written_once(tmp_path):
    red, blue = encoded(6, 4), encoded(800, 400, "blue", "JPEG")
    path = tmp_path / "samples" / "step_1.jsonl"
    write_samples(path, 1, [scored(images(red, blue)), scored(images(blue)), scored(None)])

    first, second = (
        {"hash": hash_of_files([file]), "file": f"samples/images/{hash_of_files([file])}.png"} for file in (red, blue)
    )
    first |= {"width": 6, "height": 4}
    second |= {"width": 800, "height": 400}
    found = [row.get("images") for row in rows(path)]
    assert found == [[first, second], [first, second], [second], [second], None, None]
    folder = tmp_path / "samples" / "images"
    assert sorted(file.name for file in folder.iterdir()) == sorted([f"{first['hash']}.png", f"{second['hash']}.png"])
    with Image.open(folder / f"{second['hash']}.png") as picture:  # 800 x 400 on at most 384 x 384
        assert (picture.format, picture.size) == ("PNG", (384, 192))

    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    write_samples(tmp_path / "validation" / "step_1.jsonl", 1, [scored(images(red))])
    assert rows(tmp_path / "validation" / "step_1.jsonl")[0]["images"] == [first]
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_nothing_but_the_picture_is_copied(tmp_path):
    info = PngImagePlugin.PngInfo()
    info.add_text("note", "<script>alert(1)</script>")
    hostile = encoded(3, 3, pnginfo=info) + b"<script>alert(2)</script>"
    write_samples(tmp_path / "samples" / "step_1.jsonl", 1, [scored(images(hostile))])

    [file] = (tmp_path / "samples" / "images").iterdir()
    assert b"script" in hostile and b"script" not in file.read_bytes()


def test_the_folder_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_images, "MAX_FILES", 1)
    path = tmp_path / "samples" / "step_1.jsonl"
    write_samples(path, 1, [scored(images(encoded(1, 1), encoded(2, 2)))])

    first, second = rows(path)[0]["images"]
    assert first["file"] and second == {"hash": second["hash"], "file": None, "width": 2, "height": 2}
    assert len(list((tmp_path / "samples" / "images").iterdir())) == 1


def test_a_run_without_images_has_no_folder_for_them(tmp_path):
    write_samples(tmp_path / "samples" / "step_1.jsonl", 1, [scored(None)])
    assert not (tmp_path / "samples" / "images").exists()
