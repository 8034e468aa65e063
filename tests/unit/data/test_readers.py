from __future__ import annotations

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.readers import MAX_LISTED, check_files, data_sources, read_rows
from posttrain.data.record_files import count_rows, read_records
from posttrain.errors import DataError


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_rows_come_in_file_order_from_every_kind(tmp_path, row, data_config, name):
    path = write(tmp_path / name, [row("first", "1"), row("second", "2")])

    first, second = read_rows(path, data_config())

    assert first.messages == [{"role": "user", "content": "first"}]
    assert (first.number, first.data_source, first.ground_truth) == (0, "sums", "1")
    assert first.extra_info == {"split": "train", "index": 0}
    assert (second.number, second.messages[0]["content"], second.ground_truth) == (1, "second", "2")
    assert count_rows(path) == 2


def test_json_may_also_hold_one_object_per_line(tmp_path, row, data_config):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(row("x")) + "\n\n" + json.dumps(row("y")) + "\n")

    assert [item.messages[0]["content"] for item in read_rows(path, data_config())] == ["x", "y"]


def test_csv_with_json_cells(tmp_path, data_config):
    path = tmp_path / "a.csv"
    path.write_text(
        "prompt,data_source,reward_model,extra_info\n"
        '"[{""role"": ""user"", ""content"": ""a, b""}]",sums,"{""ground_truth"": ""7""}","{""index"": 3}"\n'
        '"[INST] one\ntwo",sums,"{""ground_truth"": 8}",\n'
    )

    first, second = read_rows(path, data_config())

    assert first.messages == [{"role": "user", "content": "a, b"}]
    assert (first.ground_truth, first.extra_info) == ("7", {"index": 3})
    assert second.messages == [{"role": "user", "content": "[INST] one\ntwo"}]  # words, not JSON
    assert (second.ground_truth, second.extra_info) == (8, {})
    assert count_rows(path) == 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_flat_ground_truth_column(tmp_path, data_config, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        path.write_text("prompt,data_source,answer\nhow many?,sums,{not json}\n")
    else:
        write(path, [{"prompt": "how many?", "data_source": "sums", "answer": "{not json}"}])

    [row] = read_rows(path, data_config(ground_truth_column="answer"))

    assert row.ground_truth == "{not json}"
    assert row.messages == [{"role": "user", "content": "how many?"}]
    assert row.extra_info == {}


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_column_called_exactly_like_the_dotted_path(tmp_path, data_config, name):
    """pandas.json_normalize flattens reward_model so."""
    path = tmp_path / name
    if name == "a.csv":
        path.write_text("prompt,data_source,reward_model.ground_truth\nhow many?,sums,7\n")
    else:
        write(path, [{"prompt": "how many?", "data_source": "sums", "reward_model.ground_truth": "7"}])

    assert [row.ground_truth for row in read_rows(path, data_config())] == ["7"]


def test_keys_that_parquet_fills_with_none_are_left_out(tmp_path, row, data_config):
    messages = [{"role": "user", "content": "x", "name": "Ann"}, {"role": "user", "content": "y"}]
    path = write(tmp_path / "a.parquet", [row(prompt=messages)])

    [read] = read_rows(path, data_config())

    assert read.messages == messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "column prompt holds a list of 0 messages"),
        ({"prompt": " "}, "column prompt holds an empty text"),
        ({"prompt": 5}, "column prompt holds 5"),
        ({"prompt": ["hello"]}, "column prompt holds 'hello' as message 0"),
        ({"prompt": [{"role": "user"}]}, "column prompt has no content in message 0"),
        ({"prompt": [{"content": "x"}]}, "column prompt has no role in message 0"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image"}]}]},
            "column prompt holds a list of 1 as content of message 1",
        ),
        ({"data_source": None}, "column data_source holds nothing"),
        ({"reward_model": {"style": "rule", "ground_thruth": "1"}}, "did you mean ground_thruth?"),
        ({"reward_model": "72"}, "column reward_model.ground_truth cannot be reached: reward_model holds '72'"),
        ({"extra_info": "{}"}, "column extra_info holds '{}'; a mapping is expected"),
    ],
)
def test_a_bad_cell_names_row_file_and_column(tmp_path, row, data_config, changes, message):
    path = write(tmp_path / "train.jsonl", [row(), row(**changes)])

    with pytest.raises(DataError) as caught:
        list(read_rows(path, data_config()))

    text = str(caught.value)
    assert "row 1 of train.jsonl" in text
    assert message in text


def test_all_bad_rows_are_reported_together_up_to_a_limit(tmp_path, row, data_config):
    path = write(tmp_path / "train.jsonl", [row(), *[row(prompt=[])] * 2, row(), *[row(prompt=[])] * 20])

    with pytest.raises(DataError) as caught:
        list(read_rows(path, data_config()))

    rows = [problem.what.split(" of ")[0] for problem in caught.value.problems]
    assert len(rows) == MAX_LISTED
    assert rows[:3] == ["row 1", "row 2", "row 4"]


def test_broken_text_files_name_the_line(tmp_path, row, data_config):
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps(row()) + '\n{"prompt": oops}\n')
    with pytest.raises(DataError, match=r"line 2 of a\.jsonl is not JSON: .* at column 12"):
        list(read_rows(lines, data_config()))

    table = tmp_path / "a.csv"
    table.write_text("prompt,data_source,answer\nhi, there,sums,7\n")
    with pytest.raises(DataError, match=r"row 0 of a\.csv \(line 2\) has 4 cells under a header of 3"):
        list(read_rows(table, data_config(ground_truth_column="answer")))

    table.write_text('prompt,data_source,reward_model\nhi,sums,"{""ground_truth"": 7"\n')
    with pytest.raises(DataError, match=r"row 0 of a\.csv .*the cell in column reward_model is not JSON"):
        list(read_rows(table, data_config()))

    for latin in (tmp_path / "b.jsonl", tmp_path / "b.json", tmp_path / "b.csv"):
        latin.write_bytes('{"prompt": "é"}'.encode("latin-1"))
        with pytest.raises(DataError, match=rf"{latin.name} is not UTF-8 text"):
            list(read_rows(latin, data_config()))


def test_check_files_finds_everything_at_once(tmp_path, row, data_config):
    write(tmp_path / "train.parquet", [row()])
    write(tmp_path / "wrong_column.parquet", [row() | {"prompts": "x"}])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not a table")
    write(tmp_path / "empty.jsonl", [])
    write(tmp_path / "shape.jsonl", [row(prompt=[])])
    (tmp_path / "notes.txt").write_text("hello")
    data = data_config(
        train_files=[
            str(tmp_path / name) for name in ("trian.parquet", "broken.parquet", "notes.txt", "nowhere/a.json")
        ],
        validation_files=[
            str(tmp_path / "empty.jsonl"),
            str(tmp_path / "shape.jsonl"),
            str(tmp_path),
            "s3://bucket/a.parquet",
        ],
    )

    problems = check_files(data)

    expected = [
        ("data.train_files", "there is no file", f"did you mean {tmp_path / 'train.parquet'}?"),
        ("data.train_files", "broken.parquet cannot be read", ""),
        ("data.train_files", "notes.txt is of no known kind", "use one of .parquet, .jsonl, .json, .csv"),
        ("data.train_files", f"the folder {tmp_path / 'nowhere'} does not exist", ""),
        ("data.validation_files", "empty.jsonl holds no rows", ""),
        ("data.prompt_column", "row 0 of shape.jsonl: column prompt holds a list of 0 messages", ""),
        ("data.validation_files", "is a folder", "name the files in it"),
        ("data.validation_files", "s3://bucket/a.parquet is not on this machine", ""),
    ]
    assert len(problems) == len(expected)
    for problem, (field, what, fix) in zip(problems, expected, strict=True):
        assert problem.field == field
        assert what in problem.what
        assert fix in problem.fix


def test_missing_columns_are_all_named_with_the_nearest_one(tmp_path, row, data_config):
    good = row()
    renamed = {"prompts": good["prompt"], "source": good["data_source"], "reward_model": good["reward_model"]}
    path = write(tmp_path / "a.parquet", [renamed])

    problems = check_files(data_config(train_files=[str(path)], extra_info_column="info"))

    assert [(item.field, item.fix) for item in problems] == [
        ("data.prompt_column", "did you mean data.prompt_column=prompts?"),
        ("data.data_source_column", "did you mean data.data_source_column=source?"),
        ("data.extra_info_column", "add it, or name another with data.extra_info_column"),
    ]
    assert "none of the columns prompt, messages (columns: prompts, source, reward_model)" in problems[0].what


def test_no_training_file_and_a_home_folder(tmp_path, row, data_config, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", [row()])

    assert check_files(data_config(train_files=["~/a.jsonl"])) == []
    assert len(list(read_rows("~/a.jsonl", data_config()))) == count_rows("~/a.jsonl") == 1
    assert [problem.field for problem in check_files(data_config(train_files=[]))] == ["data.train_files"]


SKYRL = {
    "prompt": [{"role": "user", "content": "how many?"}],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "7"},
    "reward_model": "rule",  # SkyRL keeps columns that it does not know
}
ROLL = {
    "id": "1",
    "messages": json.dumps([{"role": "user", "content": "how many?"}]),
    "ground_truth": "7",
    "tag": "deepmath_103k",
}


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.json", "train.csv"])
@pytest.mark.parametrize(
    ("row", "source"),
    [
        (SKYRL, "gsm8k"),
        (SKYRL | {"data_source": "openai/gsm8k"}, "openai/gsm8k"),
        (ROLL, "deepmath_103k"),
        (ROLL | {"messages": json.loads(ROLL["messages"])}, "deepmath_103k"),
        ({"prompt": "how many?", "answer": "7"}, "train"),  # the file's own name
        ({"prompt": "how many?", "answer": "6", "reward_model": {"ground_truth": "7"}, "tag": "sums"}, "sums"),
    ],
)
def test_the_usual_columns_are_found(tmp_path, data_config, name, row, source):
    path = tmp_path / name
    if name.endswith(".csv"):
        if row.get("reward_model") == "rule":
            pytest.skip("in a csv file a nested column cannot be told from a text before its cells are read")
        cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        with path.open("w", newline="") as text:
            csv.writer(text).writerows([list(row), cells])
    else:
        write(path, [row])

    [read] = read_rows(path, data_config())

    assert read.messages == [{"role": "user", "content": "how many?"}]
    assert (read.data_source, read.ground_truth) == (source, "7")
    assert check_files(data_config(train_files=[str(path)])) == []
    assert data_sources(path, data_config()) == {source}


def test_a_problem_of_a_file_with_two_uses_is_one(tmp_path, row, data_config):
    path = str(write(tmp_path / "a.jsonl", [row()]))
    data = data_config(train_files=[path], validation_files=[path], prompt_column="promt")

    assert [problem.field for problem in check_files(data)] == ["data.prompt_column"]


def test_columns_are_found_file_by_file_and_stay_for_a_whole_file(tmp_path, row, data_config):
    skyrl = write(tmp_path / "a.jsonl", [SKYRL])
    mixed = write(tmp_path / "b.jsonl", [row(), SKYRL])

    assert [
        item.ground_truth
        for path in (skyrl, write(tmp_path / "c.jsonl", [ROLL]))
        for item in read_rows(path, data_config())
    ] == ["7", "7"]
    with pytest.raises(DataError) as caught:
        list(read_rows(mixed, data_config()))
    assert "row 1 of b.jsonl has no column 'data_source'" in str(caught.value)


def test_named_columns_are_meant(tmp_path, data_config):
    path = write(tmp_path / "a.parquet", [SKYRL | {"ground_truth": "8", "task": "sums"}])
    named = data_config(ground_truth_column="ground_truth", data_source_column="task")

    [read] = read_rows(path, named)

    assert (read.data_source, read.ground_truth) == ("sums", "8")
    problems = check_files(data_config(train_files=[str(path)], prompt_column="messages", data_source_column="tag"))
    assert [problem.field for problem in problems] == ["data.prompt_column", "data.data_source_column"]


def test_a_file_without_any_usual_column_says_so(tmp_path, data_config):
    path = write(tmp_path / "a.jsonl", [{"question": "how many?", "solution": "7"}])

    problems = check_files(data_config(train_files=[str(path)]))

    assert [(problem.field, problem.what) for problem in problems] == [
        (
            "data.prompt_column",
            "line 1 of a.jsonl has none of the columns prompt, messages (columns: question, solution)",
        ),
        (
            "data.ground_truth_column",
            "line 1 of a.jsonl has none of the columns reward_model.ground_truth, reward_spec.ground_truth, ground_truth, "
            "answer (columns: question, solution)",
        ),
    ]
    assert problems[0].fix == "did you mean data.prompt_column=question?"
    assert problems[1].fix == "did you mean data.ground_truth_column=solution?"
    path = write(tmp_path / "b.jsonl", [{"x": "how many?", "answer": "7"}])
    (problem,) = check_files(data_config(train_files=[str(path)]))
    assert problem.fix == "name the one it has with data.prompt_column"


def test_messages_as_text_that_are_broken(tmp_path, data_config):
    path = write(
        tmp_path / "a.jsonl", [ROLL | {"messages": '[{"role": "user"'}, ROLL | {"messages": "[1, 2] is a list"}]
    )

    with pytest.raises(DataError, match=r"row 0 of a\.jsonl: column messages holds messages that are not JSON"):
        list(read_rows(path, data_config()))
    path = write(tmp_path / "b.jsonl", [ROLL | {"messages": "[1, 2] is a list"}])
    assert [row.messages[0]["content"] for row in read_rows(path, data_config())] == ["[1, 2] is a list"]


def test_the_distinct_data_sources_of_a_file(tmp_path, row, data_config):
    rows = [row(data_source="b"), row(data_source="a"), row(data_source="b")]
    for name in ("a.parquet", "a.jsonl", "a.json"):
        assert data_sources(write(tmp_path / name, rows), data_config()) == {"a", "b"}


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_further_columns_go_into_the_extra_information(tmp_path, row, data_config, name):
    path = write(tmp_path / name, [{**row("x", "1"), "db_id": "shop", "tests": [{"stdin": "1"}]}])
    [read] = read_rows(path, data_config(extra_columns=["db_id", "tests", "not_there"]))
    assert read.extra_info == {"split": "train", "index": 0, "db_id": "shop", "tests": [{"stdin": "1"}]}
    with pytest.raises(DataError, match=r"has no column 'db_ids' .*did you mean data.extra_columns=db_id\?"):
        list(read_rows(path, data_config(extra_columns=["db_ids"])))
    # A column that is read is no misspelling of another that may be absent
    [read] = read_rows(path, data_config(extra_columns=["tests", "test"]))
    assert "test" not in read.extra_info


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_half_a_character_is_named_with_its_row_and_column(tmp_path, name):
    """JSON can write one half of a surrogate pair, and no tokenizer can read it."""
    whole = {"prompt": "\U0001f600", "extra_info": {"x": 1}}
    half = {"prompt": [{"role": "user", "content": "hi \ud83d"}]}
    rows = [json.dumps(whole), json.dumps(half)]
    (tmp_path / name).write_text("\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]")
    with pytest.raises(
        DataError, match=r"(line 2|row 1) of a\.jsonl?: column prompt holds half a character, '\\ud83d'"
    ):
        list(read_records(tmp_path / name))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_a_run_without_rewards_wants_no_reference_answers(tmp_path, data_config, name):
    path = tmp_path / name
    if name == "a.csv":
        path.write_text("prompt\none\ntwo\n")
    else:
        write(path, [{"prompt": "one"}, {"prompt": "two"}])
    data = data_config(train_files=[str(path)], data_source_column="data_source")  # verl's default for that column

    assert [problem.field for problem in check_files(data)] == ["data.data_source_column", "data.ground_truth_column"]
    assert check_files(data, references=False) == []
    rows = list(read_rows(path, data, references=False))
    assert [(row.ground_truth, row.data_source) for row in rows] == [(None, "a"), (None, "a")]


def test_reference_answers_that_nothing_needs_are_read_where_they_are(tmp_path, data_config):
    path = write(tmp_path / "a.jsonl", [{"prompt": "one", "answer": "1"}, {"prompt": "two"}])

    assert [row.ground_truth for row in read_rows(path, data_config(), references=False)] == ["1", None]
    with pytest.raises(DataError, match=r"row 1 of a\.jsonl has no column 'answer'"):
        list(read_rows(path, data_config()))
    named = data_config(train_files=[str(path)], ground_truth_column="answr", data_source_column="tsk")
    assert [problem.fix for problem in check_files(named, references=False)] == [
        "add it, or name another with data.data_source_column",
        "did you mean data.ground_truth_column=answer?",
    ]
