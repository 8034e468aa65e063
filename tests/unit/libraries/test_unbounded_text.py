"""Small files that stand for very much: aliases of aliases, thousands of levels."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from posttrain.config.reading.compose import compose
from posttrain.data.images import BadImage, read_images
from posttrain.data.record_files import read_records
from posttrain.data.tool_forms import calls_of
from posttrain.errors import ConfigError, DataError
from posttrain.libraries import json_text, yaml_text
from posttrain.report.read import read_run

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGES = "m0: &m0 {a: 1}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{','.join([f'*m{n - 1}'] * 9)}], k: [{','.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
)
FLOW = "a: " + "[" * 3000 + "]" * 3000
BLOCK = "".join(" " * level + "a:\n" for level in range(3000))
DIGITS = "a: {b: " + "9" * 5000 + "}"
MANY = "a: [" + "1," * 200_000 + "1]"


@pytest.mark.parametrize(
    "text", [LAUGHS, MERGES, FLOW, BLOCK, MANY, DIGITS], ids=["laughs", "merges", "flow", "block", "many", "digits"]
)
def test_a_configuration_that_is_too_much_is_refused_at_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(
        ConfigError, match=r"(nest more than 100 deep|more than 100,000 values|5000 digits).*run\.yaml:\d+"
    ):
        compose(str(tmp_path / "run.yaml"), [])
    assert time.process_time() - start < 10.0


def test_the_report_reads_such_a_configuration_as_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for text in (LAUGHS, FLOW):
        (tmp_path / "config.yaml").write_text(text)
        run = read_run(tmp_path)
        assert run.config == {}
        assert "config.yaml could not be read." in run.notes


def test_an_ordinary_file_with_aliases_reads_as_before(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: {<<: *a, x: 2}\nc: [*a, *a]\nd: &d 3\ne: *d\n"
    (tmp_path / "run.yaml").write_text(text)
    assert compose(str(tmp_path / "run.yaml"), []).values == yaml.safe_load(text) == yaml_text.safe_load(text)


def test_a_file_that_never_ends_and_a_deep_override() -> None:
    with pytest.raises(ConfigError, match="more than 10,000,000 characters"):
        compose("/dev/zero", [])
    with pytest.raises(ConfigError, match="nests too deep for an override"):
        compose(None, ["a=" + "[" * 3000 + "]" * 3000])


@pytest.mark.parametrize("depth", [101, 900, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_json_is_a_row_that_is_refused(depth: int, opening: str, tmp_path: Path) -> None:
    closing = "]" if opening == "[" else "}"
    deep = opening * depth + "1" + closing * depth
    with pytest.raises(json.JSONDecodeError, match="more than 100 deep"):
        json_text.loads(deep)
    with pytest.raises(json.JSONDecodeError, match="more than 100 deep"):
        json_text.loads(deep.encode())
    for name, text in (
        ("rows.jsonl", f'{{"prompt": "?", "extra_info": {deep}}}\n'),
        ("rows.json", f'[{{"a": {deep}}}]'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=r"(line 1 of rows\.jsonl|rows\.json) is not JSON: .*100 deep"):
            list(read_records(tmp_path / name))
    [call] = calls_of("hermes", f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>', {})
    assert "100 deep" in call.problem


def test_json_of_a_hundred_levels_and_many_brackets_is_read() -> None:
    deep = "[" * 100 + "]" * 100
    assert json_text.loads(deep) == json.loads(deep)
    wide = "[" + ",".join(["[]"] * 1000) + ', "[[["]'
    assert json_text.loads(wide) == json.loads(wide)


def test_an_image_is_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(BadImage, match="holds an image that is no file"):
            read_images(str(path), tmp_path, 10_000)


@pytest.mark.parametrize(
    "override", ["run.name='a\udc80'", "run.name='\ud800'", "run.folder='x\udfff'", "tracking.tags=['\ud800']"]
)
def test_half_a_character_in_a_setting_is_a_problem_with_its_place(override: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds half a character, .* at override "):
        compose(None, [override])


def test_half_a_character_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALF", "a\udc80")
    with pytest.raises(ConfigError, match=r"run\.name holds half a character"):
        compose(None, ["run.name=${oc.env:HALF}"])
