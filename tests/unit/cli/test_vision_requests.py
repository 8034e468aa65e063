"""What plan and data say of images, before torch is loaded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.cli.plan_text import plan_text
from posttrain.cli.request import TrainRequest, read_request
from posttrain.errors import RequestError
from posttrain.models.tiny import write_tiny_model
from posttrain.models.tiny_vision import write_tiny_vision_model


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    made = CliRunner().invoke(app, ["data", "shapes", str(folder), "--train-rows", "10", "--validation-rows", "2"])
    assert made.exit_code == 0, made.output
    return folder / "train.parquet"


def read(folder: Path, file: Path, model: Path, *overrides: str) -> TrainRequest:
    (folder / "run.yaml").write_text(
        f"model: {{path: {model}}}\ndata: {{train_files: {file}, prompts_per_step: 2}}\n"
        f"run: {{folder: {folder}/out, total_steps: 1}}\nreward: {{terms: [{{name: by_data_source}}]}}\n"
    )
    return read_request([str(folder / "run.yaml"), *overrides], None, look_at_files=True)


def test_a_plan_counts_the_first_images(tmp_path: Path, shapes: Path) -> None:
    model = write_tiny_vision_model(tmp_path / "model")
    request = read(tmp_path, shapes, model)
    assert request.images == "in the first 10 prompts: 10 images of 56 x 56 pixels, at most 1 in a row"
    assert f"images     {request.images}; each counts in max_prompt_tokens" in plan_text(request)
    assert read(tmp_path, shapes, model, "data.image_column=null").images == ""


def test_a_model_that_reads_text_only_is_refused_at_once(tmp_path: Path, shapes: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    with pytest.raises(RequestError) as error:
        read(tmp_path, shapes, model)
    [problem] = error.value.problems
    assert problem.what == f"the prompts have images, and the model at {model} (llama) reads text only"
    assert problem.where.endswith("run.yaml:1 model.path") and "data.image_column=null" in problem.fix
    assert read(tmp_path, shapes, model, "data.image_column=null").training_prompts == 10


def test_what_images_do_not_go_with_is_told_at_once(tmp_path: Path, shapes: Path) -> None:
    model = write_tiny_vision_model(tmp_path / "model")
    with pytest.raises(RequestError) as error:
        read(tmp_path, shapes, model, "tracking.batches_every_steps=1", "reward.model={path: x, own_template: true}")
    assert {"tracking.batches_every_steps", "reward.model.own_template"} <= {one.field for one in error.value.problems}


def test_broken_images_stop_a_request(tmp_path: Path, shapes: Path) -> None:
    rows = pq.read_table(shapes).to_pylist()
    rows[3]["images"] = [{"bytes": rows[3]["images"][0]["bytes"][:60], "path": None}]
    rows[5]["images"] = []
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(shapes)), tmp_path / "bad.parquet")
    with pytest.raises(RequestError) as error:
        read(tmp_path, tmp_path / "bad.parquet", write_tiny_vision_model(tmp_path / "model"))
    assert [problem.what[:62] for problem in error.value.problems] == [
        "row 3 of bad.parquet: column images holds image 0 that is corr",
        "row 5 of bad.parquet: column images holds 0 images, and the pr",
    ]


def test_data_check_counts_images_and_their_tokens(tmp_path: Path, shapes: Path) -> None:
    """56 x 56 pixels are scaled to 32 x 32, the tiny model's most: (32 / 4 / 2)^2 = 16 tokens."""
    model = write_tiny_vision_model(tmp_path / "model")
    found = CliRunner().invoke(app, ["data", "check", str(shapes), "--model", str(model)])
    assert found.exit_code == 0, found.output
    lines = [line for line in found.output.splitlines() if "images" in line]
    assert lines == ["10 images of 56 x 56 pixels, at most 1 in a row, 16 tokens each for this model"]


def test_what_cannot_be_drawn_writes_nothing(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["data", "shapes", str(tmp_path / "out"), "--kinds", "9"])
    assert "kinds is 9; use 1 to 4" in str(refused.exception)
    assert not (tmp_path / "out").exists()
