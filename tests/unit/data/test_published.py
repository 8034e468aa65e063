"""Published datasets become the schemas that training reads; what is wrong is told by row and column."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from posttrain.config.data import DataConfig
from posttrain.config.reward import RewardConfig
from posttrain.config.sft import SftDataConfig
from posttrain.data.check import check_dataset
from posttrain.data.published import write_published
from posttrain.data.readers import read_rows
from posttrain.data.sft_rows import read_sft_rows
from posttrain.errors import DataError
from posttrain.records.prompts import Prompt
from posttrain.rewards.load import load_rewards

GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}
MATH = {"problem": "Half?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."}
HH = {"prompt": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:", "chosen": " So.", "rejected": " No."}
HH_WHOLE = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: So.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: No.",
}
ASKED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(tmp_path: Path, name: str, row: Any, **options: Any) -> dict[str, Any]:
    [path] = write_published(name, tmp_path / "out", {"train": lines(tmp_path / "raw.jsonl", row)}, **options)
    [found] = pq.read_table(path).to_pylist()
    return found


def scored(row: dict[str, Any], response: str) -> float:
    """What the row's own built-in scorer gives a response."""
    truth = row["reward_model"]["ground_truth"]
    prompt = Prompt(prompt_id="a:0", token_ids=(1,), text="?", data_source=row["data_source"], ground_truth=truth)
    outcome = load_rewards(RewardConfig(terms=[{"name": "by_data_source"}])).score_response(prompt, response)
    return outcome.value  # type: ignore[union-attr]


def test_gsm8k(tmp_path: Path) -> None:
    row = made(tmp_path, "gsm8k", GSM8K)
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"Two and two? {instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1004"},
        "extra_info": {"split": "train", "index": 0, "answer": GSM8K["answer"], "question": GSM8K["question"]},
    }
    assert scored(row, "#### 1,004") == 1.0
    assert made(tmp_path, "gsm8k", GSM8K, instruction="")["prompt"][0]["content"] == "Two and two?"


def test_math(tmp_path: Path) -> None:
    row = made(tmp_path, "math", MATH)
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert row["extra_info"] == {"split": "train", "index": 0, "level": "Level 1", "type": "Algebra"}
    assert scored(row, r"\boxed{1/2}") == 1.0
    folder = tmp_path / "MATH" / "algebra"  # as the archive of its authors holds it
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps(MATH))
    [path] = write_published("math", tmp_path / "out", {"train": tmp_path / "MATH"})
    assert pq.read_table(path).to_pylist() == [row]


def png() -> bytes:
    file = BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("images", "problem", "what"),
    [
        (
            [{"bytes": b"\x89PNG, or so it says", "path": None}],
            "<image>x?",
            "holds image 0 that is 19 bytes of no known",
        ),
        ([{"bytes": None, "path": "a.png"}], "<image>x?", "holds an image without its bytes"),
        ([{"bytes": png(), "path": None}], "x?", "holds 1 image, and the prompt has 0 places"),
        ([], "<image>x?", "holds 0 images, and the prompt has 1 place"),
    ],
)
def test_geo3k_with_broken_figures_is_refused(tmp_path: Path, images: list[Any], problem: str, what: str) -> None:
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    row = {"images": images, "problem": problem, "answer": "3"}
    schema = pa.schema({"images": kind, "problem": pa.string(), "answer": pa.string()})
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "raw.parquet")
    with pytest.raises(DataError) as error:
        write_published("geo3k", tmp_path / "out", {"test": tmp_path / "raw.parquet"})
    assert str(error.value).startswith(f"row 0 of raw.parquet: column images {what}")
    assert not (tmp_path / "out").exists()


def test_geo3k_copies_images_as_they_are(tmp_path: Path) -> None:
    image = {"bytes": png(), "path": None}
    table = pa.Table.from_pylist([{"images": [image], "problem": "<image>x?", "answer": "3"}] * 2)
    pq.write_table(table, tmp_path / "raw.parquet")
    [path] = write_published("geo3k", tmp_path / "out", {"test": tmp_path / "raw.parquet"})
    found = pq.read_table(path)
    assert found["images"].to_pylist() == [[image]] * 2
    assert found.schema.field("images").type == table.schema.field("images").type
    row = found.to_pylist()[1]
    assert row["prompt"][0]["content"].startswith("<image>x? First think")
    assert row["extra_info"] == {"split": "test", "index": 1, "answer": "3", "question": "<image>x?"}
    assert scored(row, r"<think>hm</think> \boxed{3}") == 1.0


@pytest.mark.parametrize("row", [HH, HH_WHOLE], ids=["Dahoas", "Anthropic"])
def test_hh_rlhf_in_its_three_forms(tmp_path: Path, row: dict[str, str]) -> None:
    rl = made(tmp_path, "hh-rlhf", row, form="rl")
    assert rl["prompt"] == ASKED
    assert rl["reward_model"] == {"style": "model", "ground_truth": "So."}
    assert rl["ability"] == "alignment"
    assert made(tmp_path, "hh-rlhf", row, form="sft") == {"messages": [*ASKED, {"role": "assistant", "content": "So."}]}
    assert made(tmp_path, "hh-rlhf", row, form="rm") == {
        "prompt": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:",
        "chosen": "So.",
        "rejected": "No.",
    }
    with_system = made(tmp_path, "hh-rlhf", row, form="sft", instruction="Be kind.")
    assert with_system["messages"][0] == {"role": "system", "content": "Be kind."}


def test_the_files_are_what_training_reads(tmp_path: Path) -> None:
    for name, row in (("gsm8k", GSM8K), ("math", MATH), ("hh-rlhf", HH)):
        raw = lines(tmp_path / "raw.jsonl", row, row)
        [path] = write_published(name, tmp_path / name, {"train": raw})
        assert len(list(read_rows(path, DataConfig(train_files=[str(path)])))) == 2
        found = check_dataset(str(path), "rl")
        assert (found.rows, found.bad) == (2, 0)
    [path] = write_published("hh-rlhf", tmp_path / "sft", {"train": raw}, form="sft")
    assert len(list(read_sft_rows(str(path), SftDataConfig(train_files=[str(path)])))) == 2
    assert check_dataset(str(path), "sft").bad == 0


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("gsm8k", {"question": "a", "answer": "4"}, 'row 1 of raw.jsonl: column answer holds no "#### "'),
        ("gsm8k", {"question": None, "answer": "#### 4"}, "row 1 of raw.jsonl: column question holds nothing"),
        ("gsm8k", {"question": " ", "answer": "#### 4"}, "row 1 of raw.jsonl: column question holds an empty text"),
        ("gsm8k", {"query": "a", "answer": "#### 4"}, "raw.jsonl has no column question (columns: query, answer)"),
        ("math", {"problem": "a", "solution": "so 4"}, r"row 1 of raw.jsonl: column solution holds no \boxed{…}"),
        ("math", {"problem": "a", "solution": r"\boxed{4"}, "row 1 of raw.jsonl: column solution holds no"),
        ("hh-rlhf", {"chosen": "Hi", "rejected": "Hi"}, 'column chosen does not begin with "\\n\\nHuman: "'),
        (
            "hh-rlhf",
            {**HH_WHOLE, "rejected": "\n\nHuman: Bye\n\nAssistant: No"},
            "column rejected is another conversation",
        ),
        ("hh-rlhf", {**HH_WHOLE, "chosen": "\n\nHuman: Hi"}, "column chosen does not end with an answer of Assistant"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, row: dict[str, Any], says: str) -> None:
    good = {"gsm8k": GSM8K, "math": MATH, "hh-rlhf": HH_WHOLE}[name]
    with pytest.raises(DataError) as raised:
        write_published(name, tmp_path / "out", {"train": lines(tmp_path / "raw.jsonl", good, row)})
    assert says in str(raised.value)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------- check

GOOD = {"data_source": "openai/gsm8k", "prompt": "q", "reward_model": {"ground_truth": "4"}}


def test_check_counts_what_it_does_not_show(tmp_path: Path) -> None:
    rows = [GOOD if number % 2 else {**GOOD, "prompt": []} for number in range(50)]
    found = check_dataset(str(lines(tmp_path / "a.jsonl", *rows)), "rl")
    assert (found.rows, found.bad, len(found.problems)) == (50, 25, 20)
    assert (
        found.problems[1].what == "row 2 of a.jsonl: column prompt holds a list of 0 messages; at least one is expected"
    )
    assert found.sources == {"openai/gsm8k": 25}


@pytest.mark.parametrize(
    ("purpose", "row", "says"),
    [
        ("rl", {"data_source": "t", "reward_model": {"ground_truth": "4"}}, "row 1 of a.jsonl has no column 'prompt'"),
        ("rl", {**GOOD, "reward_model": 4}, "column reward_model.ground_truth cannot be reached"),
        ("rl", {**GOOD, "data_source": 4}, "row 1 of a.jsonl: column data_source holds 4"),
        (
            "sft",
            {"messages": [{"role": "user", "content": "q"}]},
            "row 1 of a.jsonl: column messages holds no assistant",
        ),
        (
            "sft",
            {"messages": [{"role": "usr", "content": "q"}]},
            "row 1 of a.jsonl: column messages holds 'usr' as role",
        ),
        ("evaluate", {**GOOD, "responses": [1]}, "row 1 of a.jsonl: column responses holds 1 as response 0"),
        ("evaluate", {**GOOD, "responses": []}, "row 1 of a.jsonl: column responses holds a list of 0 responses"),
    ],
)
def test_check_names_row_and_column(tmp_path: Path, purpose: Any, row: dict[str, Any], says: str) -> None:
    first: dict[str, Any] = {
        "rl": GOOD,
        "sft": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        "evaluate": {**GOOD, "responses": ["a"]},
    }[purpose]
    found = check_dataset(str(lines(tmp_path / "a.jsonl", first, row)), purpose)
    assert found.bad == 1
    assert says in found.problems[0].what


def test_check_of_what_is_no_dataset(tmp_path: Path) -> None:
    assert "there is no file" in check_dataset(str(tmp_path / "none.parquet"), "rl").problems[0].what
    (tmp_path / "a.parquet").write_text("no")
    assert "cannot be read" in check_dataset(str(tmp_path / "a.parquet"), "rl").problems[0].what
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n{\n")
    assert "line 2 of a.jsonl is not JSON" in check_dataset(str(tmp_path / "a.jsonl"), "rl").problems[0].what
    (tmp_path / "b.jsonl").write_text("")
    assert "holds no rows" in check_dataset(str(tmp_path / "b.jsonl"), "sft").problems[0].what


def test_check_says_which_tasks_no_scorer_is_made_for(tmp_path: Path) -> None:
    found = check_dataset(str(lines(tmp_path / "a.jsonl", GOOD, {**GOOD, "data_source": "my/own"})), "rl")
    assert found.unscored() == ["my/own"]
