from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from posttrain.data.readers import check_files, read_rows
from posttrain.data.reasoning_gym import write_dataset
from posttrain.errors import ConfigError, DataError
from posttrain.libraries.reasoning_gym import entry_from_text

SMALL = {"min_terms": 2, "max_terms": 2, "max_digits": 1}  # a + b or a - b of digits 0-9: 10 x 2 x 10 = 200 questions


def write(folder, **changes):
    arguments = {"train_rows": 30, "validation_rows": 10, "seed": 1, "options": SMALL, "instruction": None} | changes
    return write_dataset(arguments.pop("task", "chain_sum"), folder, **arguments)


def questions(path):
    return [row["prompt"][-1]["content"] for row in pq.read_table(path).to_pylist()]


def test_rows_are_in_verl_schema_and_our_reader_takes_them(tmp_path, data_config):
    train, validation = write(tmp_path / "new" / "folder", instruction="Answer with a number.")

    assert (train.name, validation.name) == ("train.parquet", "validation.parquet")
    assert sorted(item.name for item in train.parent.iterdir()) == ["train.parquet", "validation.parquet"]
    row = pq.read_table(train).to_pylist()[3]
    entry = entry_from_text(row["extra_info"]["entry"])
    assert row == {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": entry["question"]},
        ],
        "ability": "arithmetic",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {
            "split": "train",
            "index": 3,
            "task": "chain_sum",
            "entry": row["extra_info"]["entry"],
            "options": json.dumps(SMALL, sort_keys=True),
        },
    }
    assert entry["question"].startswith("State the final answer to the following arithmetic problem: ")
    # A sum or difference of two digits, worked out here: "… problem: 7 - 4 ="
    left, sign, right = entry["question"].split(": ")[1].removesuffix(" =").split()
    assert int(entry["answer"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))

    data = data_config(train_files=[str(train)], validation_files=[str(validation)])
    assert check_files(data) == []
    assert [len(list(read_rows(path, data))) for path in (train, validation)] == [30, 10]


def test_no_question_twice_not_even_across_the_files(tmp_path):
    train, validation = write(tmp_path, train_rows=150, validation_rows=50)  # all 200 there are

    everything = questions(train) + questions(validation)
    assert len(everything) == len(set(everything)) == 200


def test_a_task_with_too_few_questions_says_how_many_there_are(tmp_path):
    with pytest.raises(DataError, match=r"chain_sum .* has only 200 different questions; 201 are requested"):
        write(tmp_path, train_rows=191, validation_rows=10)
    assert list(tmp_path.iterdir()) == []


def test_same_seed_same_files_and_validation_stays_when_training_grows(tmp_path):
    first = write(tmp_path / "1")
    again = write(tmp_path / "2")
    more = write(tmp_path / "3", train_rows=60)
    other = write(tmp_path / "4", seed=2)

    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert questions(more[1]) == questions(first[1])
    assert questions(more[0])[:30] == questions(first[0])
    assert questions(other[0]) != questions(first[0])


def test_a_task_whose_answer_only_the_verifier_knows(tmp_path, data_config):
    train, _ = write(tmp_path, task="rubiks_cube", options={}, train_rows=2, validation_rows=1)

    assert [row.ground_truth for row in read_rows(train, data_config())] == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_sums"}, "did you mean chain_sum"),
        ({"options": {"digits": 3}}, "chain_sum has no option called 'digits'"),
        ({"task": "countdown", "options": {}}, "verifier of countdown"),
        ({"validation_rows": 0}, "validation_rows is 0"),
    ],
)
def test_wrong_requests_leave_no_file(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_keeps_the_old_files(tmp_path, monkeypatch):
    paths = write(tmp_path)
    before = [path.read_bytes() for path in paths]
    written = []

    def fail_on_the_second(table, path):
        written.append(path)
        if len(written) == 2:
            raise OSError("disk full")
        path.write_bytes(b"half a file")

    monkeypatch.setattr(pq, "write_table", fail_on_the_second)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, seed=2)

    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 2
