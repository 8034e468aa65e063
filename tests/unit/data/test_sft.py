"""From files to texts to learn: columns, pairs, conversations, cutting, classes of the user's own, and batches."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.config.sft import SftDataConfig
from posttrain.data.own_dataset import load_own_texts
from posttrain.data.sft import load_texts
from posttrain.data.sft_rows import check_sft_files, read_sft_rows
from posttrain.data.text_batches import text_batch
from posttrain.errors import DataError, ModelError
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.texts import Text

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def write(folder: Path, rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return str(folder / name)


def config(file: str, **more: Any) -> SftDataConfig:
    return SftDataConfig.model_validate({"train_files": [file], **more})


def texts(file: str, **more: Any) -> list[tuple[str, str]]:
    """What is read and what is learned of every row, decoded."""
    tokenizer = tiny_tokenizer()
    found = load_texts([file], config(file, **more), tokenizer, what="training").texts
    return [(tokenizer.decode(t.token_ids[~t.learned]), tokenizer.decode(t.token_ids[t.learned])) for t in found]


def test_a_pair_is_the_prompt_as_rl_samples_from_it_and_the_response_with_its_end(tmp_path: Path) -> None:
    file = write(tmp_path, [{"question": "Hi", "answer": "Yo"}])
    assert texts(file) == [(ASKED, "Yo<|im_end|>")]


@pytest.mark.parametrize(
    ("row", "more"),
    [
        ({"prompt": "Hi", "response": "Yo"}, {}),
        ({"prompt": [{"role": "user", "content": "Hi"}], "response": "Yo"}, {}),
        ({"ask": "Hi", "say": "Yo"}, {"prompt_column": "ask", "response_column": "say"}),
        (
            {"extra": {"question": "Hi", "deep": {"answer": "Yo"}}},
            {"prompt_column": "extra.question", "response_column": "extra.deep.answer"},
        ),
        ({"a.b": "Hi", "answer": "Yo"}, {"prompt_column": "a.b"}),  # a column that is called so
        ({"messages": "other", "prompt": "Hi", "answer": "Yo"}, {"prompt_column": "prompt"}),
    ],
)
def test_where_prompt_and_response_are(tmp_path: Path, row: dict[str, Any], more: dict[str, Any]) -> None:
    assert texts(write(tmp_path, [row]), **more) == [(ASKED, "Yo<|im_end|>")]


def test_a_prompt_of_several_columns(tmp_path: Path) -> None:
    """An empty or absent query adds nothing, and neither does an empty system message."""
    rows = [
        {"ask": "Add", "more": "1+1", "who": "You add.", "say": "2"},
        {"ask": "Hi", "more": "", "who": None, "say": "Yo"},
    ]
    names = {"prompt_column": "ask", "response_column": "say", "query_column": "more", "system_column": "who"}
    first, second = texts(write(tmp_path, rows), **names)
    system = "<|im_start|>system\nYou add.<|im_end|>\n"
    assert first == (f"{system}<|im_start|>user\nAdd\n1+1<|im_end|>\n<|im_start|>assistant\n", "2<|im_end|>")
    assert second == (ASKED, "Yo<|im_end|>")


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"prompt": "Hi", "answer": "Yo"}, {"query_column": "mroe"}, "has no column mroe"),
        ({"prompt": "Hi", "answer": "Yo", "q": 3}, {"query_column": "q"}, "column q holds 3; text is expected"),
        (
            {"prompt": [{"role": "user", "content": "Hi"}], "answer": "Yo", "q": "?"},
            {"query_column": "q"},
            "column q adds to a prompt that is a list of messages",
        ),
        (
            {
                "prompt": [{"role": "system", "content": "A"}, {"role": "user", "content": "Hi"}],
                "answer": "Yo",
                "s": "B",
            },
            {"system_column": "s"},
            "column s is a second system message",
        ),
        ({"messages": TURNS, "q": "B"}, {"query_column": "q"}, "data.query_column adds to a column of prompts"),
    ],
)
def test_columns_that_do_not_go_together(
    tmp_path: Path, row: dict[str, Any], more: dict[str, str], message: str
) -> None:
    file = write(tmp_path, [row])
    with pytest.raises(DataError) as caught:
        list(read_sft_rows(file, config(file, **more)))
    assert message in str(caught.value)


def test_conversations(tmp_path: Path) -> None:
    file = write(tmp_path, [{"messages": TURNS}])
    assert texts(file) == [(ASKED + "\n", "Yo<|im_end|>")]
    file = write(tmp_path, [{"chat": json.dumps(TURNS)}])  # as csv has them
    assert texts(file, messages_column="chat") == [(ASKED + "\n", "Yo<|im_end|>")]


def test_parquet_and_csv_hold_the_same(tmp_path: Path) -> None:
    rows = [{"extra": {"q": "Hi", "a": "Yo"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    with (tmp_path / "t.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerows([["extra"], [json.dumps(rows[0]["extra"])]])
    columns = {"prompt_column": "extra.q", "response_column": "extra.a"}
    for name in ("t.parquet", "t.csv"):
        assert texts(str(tmp_path / name), **columns) == [(ASKED, "Yo<|im_end|>")]


def test_parquets_missing_keys_are_not_there(tmp_path: Path) -> None:
    """One message has a name, so parquet gives all of them one, which is nothing."""
    rows = [{"messages": [{**TURNS[0], "name": "Ann"}, TURNS[1]]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (row,) = read_sft_rows(str(tmp_path / "t.parquet"), config("x"))
    assert row.messages == rows[0]["messages"]


def test_several_workers_give_the_same_texts(tmp_path: Path) -> None:
    file = write(tmp_path, [{"question": f"{n}?", "answer": str(n)} for n in range(3)])
    assert texts(file, tokenize_workers=2) == texts(file)


def test_longer_rows(tmp_path: Path) -> None:
    """A byte is a token here, and so is a special token: the answer Yo and its end are 3."""
    file = write(tmp_path, [{"question": "Hi", "answer": "Yo"}] * 2)
    asked = len(tiny_tokenizer()(ASKED)["input_ids"])
    whole = asked + 3
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match=rf"2 of 2 training rows are longer than {whole - 1} tokens: train.jsonl:0 has"):
        texts(file, max_tokens=whole - 1)
    assert texts(file, max_tokens=whole) == [(ASKED, "Yo<|im_end|>")] * 2
    assert texts(file, max_tokens=5, overlong="truncate_left") == [(ASKED[-2:], "Yo<|im_end|>")] * 2
    # Of 3 tokens all are learned, but nothing predicts the first.
    assert texts(file, max_tokens=3, overlong="truncate_left") == [("Y", "o<|im_end|>")] * 2
    assert texts(file, max_tokens=whole - 1, overlong="truncate_right") == [(ASKED, "Yo")] * 2
    data = config(file, max_tokens=whole - 1, overlong="truncate_right")
    assert load_texts([file], data, tokenizer, what="training").notes("training") == [
        "2 of 2 training rows are too long and were cut"
    ]
    for limit, how in ((asked, "truncate_right"), (whole - 1, "filter")):  # no answer is left; no row is left
        with pytest.raises(DataError, match=rf"no training row is left: all 2 are too long for {limit} tokens"):
            texts(file, max_tokens=limit, overlong=how)


def test_rows_that_lose_their_answer_are_left_out_and_told(tmp_path: Path) -> None:
    file = write(tmp_path, [{"question": "Hi", "answer": "Yo"}, {"question": "Hi" * 40, "answer": "Yo"}])
    found = load_texts(
        [file], config(file, max_tokens=60, overlong="truncate_right"), tiny_tokenizer(), what="training"
    )
    assert [text.name for text in found.texts] == ["train.jsonl:0"]
    assert found.notes("training") == [
        "1 of 2 training rows are too long and were cut",
        "1 of 2 training rows hold no token to learn, within data.max_tokens, and are left out",
    ]


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"question": "Hi"}, {}, r"train.jsonl has no column response or answer \(it has question\); name the column"),
    (
        {"q": "Hi", "answer": "x"},
        {"prompt_column": "question"},
        r"train.jsonl has no column question \(it has q, answer\)",
    ),
    ({"question": 3, "answer": "x"}, {}, r"row 0 of train.jsonl: column question holds 3; a list of chat messages is"),
    ({"question": "Hi", "answer": None}, {}, r"row 0 of train.jsonl: column answer holds nothing; text is expected"),
    ({"question": "Hi", "answer": "  "}, {}, r"column answer holds an empty text"),
    ({"extra": {"a": 1}, "answer": "x"}, {"prompt_column": "extra.q"}, r"cannot be reached: there is no 'q' in extra"),
    ({"extra": "x", "answer": "x"}, {"prompt_column": "extra.q"}, r"cannot be reached: extra holds 'x'"),
    ({"messages": []}, {}, r"column messages holds a list of 0 messages"),
    ({"messages": "text"}, {}, r"column messages holds 'text'; a list of chat messages is expected"),
    ({"messages": "[{]"}, {}, r"column messages holds text that is not JSON"),
    ({"messages": TURNS[:1]}, {}, r"holds no assistant message, so there is nothing to learn"),
    (
        {"messages": [{"role": "bot", "content": "x"}]},
        {},
        r"holds 'bot' as role of message 0; one of system, developer, ",
    ),
    ({"messages": [{"content": "x"}]}, {}, r"has no role in message 0"),
    (
        {"messages": [*TURNS, {"role": "system", "content": "x"}]},
        {},
        r"holds a system message in place 2; it can only be",
    ),
    (
        {"messages": [{"role": "user", "content": ["x"]}]},
        {},
        r"holds a list of 1 as content of message 0; text is expected",
    ),
    ({"messages": [{"role": "user"}]}, {}, r"holds nothing as content of message 0"),
    ({"messages": TURNS, "tools": "x"}, {}, r"comes with 'x' in column tools; a list of tools is expected"),
    ({"messages": TURNS, "enable_thinking": "no"}, {}, r"in column enable_thinking; true or false is expected"),
    ({"prompt": TURNS, "response": "x"}, {}, r"column prompt ends with an assistant message"),
    ({"messages": [TURNS[1], TURNS[0]]}, {}, r"row 0 of train.jsonl: begins with an answer that no message asks for"),
]


@pytest.mark.parametrize(("row", "more", "message"), WRONG)
def test_a_row_that_is_wrong_is_named_once(
    tmp_path: Path, row: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    file = write(tmp_path, [row])
    with pytest.raises(DataError, match=message) as error:
        texts(file, **more)
    assert len(error.value.problems) == 1


def test_files_are_looked_at_before_anything_is_loaded(tmp_path: Path) -> None:
    file = write(tmp_path, [{"question": "Hi"}])
    data = config(file, validation_files=[str(tmp_path / "none.jsonl")])
    first, second = check_sft_files(data)
    assert "has no column response or answer" in first.what and first.field == "data.response_column"
    assert "there is no file" in second.what and second.field == "data.validation_files"


def test_a_tokenizer_without_a_template_or_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.eos_token = None
    file = write(tmp_path, [{"question": "Hi", "answer": "Yo"}])
    with pytest.raises(ModelError) as error:
        load_texts([file], config(file), tokenizer, what="training")
    assert ["template" in p.what or "no end-of-sequence token" in p.what for p in error.value.problems] == [True, True]


# --------------------------------------------------------------------------------------- a class of one's own

OWN = """
class Own:
    def __init__(self, parquet_files, tokenizer, config):
        self.rows, self.length = parquet_files, config.length

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"input_ids": [5, 6, 7, 0], "loss_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0]}


class Broken(Own):
    def __getitem__(self, index):
        return [{"input_ids": [1]}, {"input_ids": [1, 2], "loss_mask": [1, 0]}][index]


class Raises(Own):
    def __getitem__(self, index):
        return rows[index]


class TakesNothing:
    def __init__(self):
        pass


class Unreadable(Own):
    def __len__(self):
        raise OSError("no such disk")
"""


def own(tmp_path: Path, name: str, **more: Any) -> list[Text]:
    (tmp_path / "own.py").write_text(OWN)
    options = {"dataset_class_file": str(tmp_path / "own.py"), "dataset_class_name": name}
    data = config("a.parquet", **options, dataset_class_options={"length": 9}, **more)
    return load_own_texts(["a.parquet"], data, tiny_tokenizer(), what="training").texts


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    for text in own(tmp_path, "Own"):
        assert text.token_ids.tolist() == [5, 6, 7]
        assert text.learned.tolist() == [False, True, True]
    for text in own(tmp_path, "Own", dataset_class_mask="predictions"):  # marks 6 and 7 predict 7 and padding
        assert text.learned.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Owm", r"there is no class Owm in .*own.py; did you mean Own\?"),
        ("Unreadable", r"own.py:\d+: Unreadable could not read the training files: OSError: no such disk"),
        ("Raises", r"own.py:\d+: item 0 of Raises cannot be read: NameError: name 'rows' is not defined"),
        ("TakesNothing", r"own.py:\d+: TakesNothing could not read .*: TypeError: .*unexpected keyword argument"),
        ("Broken", r"item 0 of Broken has no loss_mask \(it has input_ids\)\nitem 1 of Broken has no token to learn"),
    ],
)
def test_what_is_wrong_with_it(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        own(tmp_path, name)


# ------------------------------------------------------------------------------------------------- batches


def test_a_batch_begins_to_answer_where_learning_begins() -> None:
    one = Text(name="a:0", token_ids=np.array([1, 2, 3, 4, 5, 6], np.int32), learned=np.array([0, 0, 1, 0, 1, 0], bool))
    other = Text(name="a:1", token_ids=np.array([7, 8], np.int32), learned=np.array([0, 1], bool))
    batch = text_batch([one, other])
    # The first row reads 1 2, then 3 (learned) 4 (read) 5 (learned); 6 changes nothing. Prompts end at the same place.
    assert batch.sequences.tokens.tolist() == [[1, 2, 3, 4, 5], [0, 7, 8, 0, 0]]
    assert batch.sequences.prompt_lengths.tolist() == [2, 1]
    assert batch.loss_mask.tolist() == [[True, False, True], [True, False, False]]
    assert batch.counts().tokens == 3
    assert batch.sequences.sample_ids == ("a:0", "a:1")


def test_rows_with_images_are_refused(tmp_path: Path) -> None:
    """Their texts alone would be learned, and nothing would show it."""
    file = write(
        tmp_path, [{"question": "Hi", "answer": "Yo", "images": []}, {"question": "<image>", "images": ["a.png"]}]
    )
    with pytest.raises(DataError) as error:
        list(read_sft_rows(file, config("x")))
    assert str(error.value).startswith("row 1 of ")
    assert "column images holds images, and fine-tuning reads text only; leave the row out" in str(error.value)


# ------------------------------------------------------------------------------------------- tokens, Alpaca, sources


def test_rows_of_tokens_are_learned_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1], "attention_mask": [1, 1, 1, 1], "labels": [1, 2, 3, 4]},
        {"input_ids": [5, 6, 7, 8, 9, 9], "loss_mask": [0, 0, 0, 0, 1, 1]},  # nothing is left of its tokens
        {"input_ids": [5, 6], "loss_mask": [0, 0]},
        {"input_ids": None, "loss_mask": []},
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 1, 1, 1, 1]},
    ]
    data = config(write(tmp_path, rows), train_tokenized=True, max_tokens=4, overlong="truncate_right")
    found = load_texts(data.train_files, data, tiny_tokenizer(), what="training")
    assert [text.token_ids.tolist() for text in found.texts] == [[5, 6, 7, 8], [1, 2, 3, 4]]
    # nothing predicts the first token
    assert [text.learned.tolist() for text in found.texts] == [[False, True, False, True], [False, True, True, True]]
    assert (found.rows, found.empty, found.cut) == (5, 3, 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "row 0 of train.jsonl: loss_mask has 1 values for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask holds 2; it is 0 or 1"),
        (
            {"input_ids": "1 2", "loss_mask": [0, 1]},
            "column input_ids holds '1 2'; a list of whole numbers is expected",
        ),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "column input_ids holds a list of 2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [0, 1]}, "rows are stored without padding"),
        ({"input_ids": [1, 2], "labels": [0, 1]}, "has no column loss_mask (it has input_ids, labels)"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no training row is left: none of the 1 holds a token to learn"),
    ],
)
def test_rows_of_tokens_that_cannot_be(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    data = config(write(tmp_path, [row]), train_tokenized=True)
    with pytest.raises(DataError) as caught:
        load_texts(data.train_files, data, tiny_tokenizer(), what="training")
    assert message in str(caught.value)


def test_alpaca_s_columns_are_a_conversation_of_two_messages(tmp_path: Path) -> None:
    rows = [
        {"instruction": " Hi ", "input": "", "output": "Yo"},
        {"instruction": "Say", "input": "Yo", "output": "Yo"},
        {"instruction": "Hi", "input": None, "output": "Yo"},
    ]
    found = texts(write(tmp_path, rows), overlong="error")
    assert [learned for _, learned in found] == ["Yo<|im_end|>"] * 3
    assert [read.split("user\n")[1].split("<|im_end|>")[0] for read, _ in found] == ["Hi", "Say\n\nYo", "Hi"]
    # Columns that are named, or usual ones, come first
    row = [{"instruction": "no", "output": "no", "prompt": "Hi", "response": "Yo"}]
    assert texts(write(tmp_path, row)) == [(ASKED, "Yo<|im_end|>")]
    assert texts(write(tmp_path, rows[1:2]), prompt_column="input", response_column="output")[0][0].count("Say") == 0


def test_a_column_of_system_messages_goes_before_conversations_without_one(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Own"}, *TURNS]
    rows = [{"messages": TURNS, "system": "Be"}, {"messages": own, "system": "Be"}, {"messages": TURNS, "system": ""}]
    read = [read for read, _ in texts(write(tmp_path, rows), system_column="system")]
    assert ["Be" in text for text in read] == [True, False, False] and "Own" in read[1]
    assert texts(write(tmp_path, [{"messages": TURNS}]), system_column="system") == texts(
        write(tmp_path, [{"messages": TURNS}])
    )


def test_texts_know_their_source(tmp_path: Path) -> None:
    files = [write(tmp_path, [{"question": "Hi", "answer": "Yo"}] * 3, f"{name}.jsonl") for name in "abc"]
    data = SftDataConfig(train_files=[files[0], f"{files[1]}[1:]", files[2]], train_sources=["x", "y", "x"])
    found = load_texts(data.train_files, data, tiny_tokenizer(), what="training")
    assert "".join(text.source for text in found.texts) == "xxxyyxxx"
