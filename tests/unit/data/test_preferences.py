"""Preference datasets: the forms of TRL, verl and ROLL, and one clear error for each bad row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config.tune import TuneConfig
from posttrain.data.preference_batches import mismatched, preference_batch
from posttrain.data.preference_rows import (
    PROMPT,
    PreferenceRow,
    check_preference_files,
    prompts_in_texts,
    read_preference_rows,
)
from posttrain.data.preferences import load_preferences
from posttrain.data.unread_columns import unread_columns
from posttrain.errors import DataError
from posttrain.models.loading import load_tokenizer
from posttrain.models.tiny import write_tiny_model

USER = {"role": "user", "content": "2+2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def config(path: Path, *rows: dict[str, Any], method: str = "dpo", model: str = "m", **data: Any) -> TuneConfig:
    file = path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return TuneConfig.model_validate(
        {"model": {"path": model}, "data": {"train_files": str(file)} | data, "method": {"name": method}}
    )


def read(path: Path, *rows: dict[str, Any], **how: Any) -> list[PreferenceRow]:
    chosen = config(path, *rows, **how)
    return list(read_preference_rows(chosen.data.train_files[0], chosen.data, chosen.method))


@pytest.mark.parametrize(
    ("row", "how"),
    [
        (PAIR, {}),
        ({"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, {}),
        ({"prompt": [USER], "chosen": RIGHT, "rejected": WRONG}, {}),
        ({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, {}),  # the prompt is what both begin with
        ({"chosen": "2+2? 4", "rejected": "2+2? 5"}, {}),  # the same with texts, TRL's implicit prompt
        (PAIR | {"label": 1}, {}),
        ({"prompt": "2+2?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, {}),  # as UltraFeedback
        ({"prompt": json.dumps([USER]), "chosen": json.dumps([RIGHT]), "rejected": json.dumps([WRONG])}, {}),  # csv
        ({"instruction": "2+2?", "chosen": "4", "rejected": "5"}, {}),  # ROLL
        ({"input": "2+2?", "chosen": "4", "rejected": "5"}, {}),  # OpenRLHF
        ({"prompt": USER, "chosen": RIGHT, "rejected": WRONG}, {}),
        # LLaMA-Factory's ShareGPT form
        (
            {
                "conversations": [{"from": "human", "value": "2+2?"}],
                "chosen": {"from": "gpt", "value": "4"},
                "rejected": {"from": "gpt", "value": "5"},
            },
            {},
        ),
        # Text parts, as OpenAI's interface has them
        (
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
                ],
                "chosen": [RIGHT],
                "rejected": [WRONG],
            },
            {},
        ),
        # Anthropic's transcripts, and its prompt in a column of its own
        ({"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"}, {}),
        ({"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "chosen": " 4", "rejected": " 5"}, {}),
        (
            {"q": "2+2?", "good": "4", "bad": "5"},
            {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"},
        ),
    ],
)
def test_forms_of_a_pair(tmp_path: Path, row: dict[str, Any], how: dict[str, Any]) -> None:
    (found,) = read(tmp_path, row, **how)
    assert found.prompt == [USER]
    assert found.completions == ([RIGHT], [WRONG])


def test_answers_with_brackets_stay_texts(tmp_path: Path) -> None:
    row = {"prompt": "[{1, 2}] is?", "chosen": '[{"a": 1}]', "rejected": "[{ broken"}
    (found,) = read(tmp_path, row)
    assert found.prompt == [{"role": "user", "content": "[{1, 2}] is?"}]
    assert [side[0]["content"] for side in found.completions] == ['[{"a": 1}]', "[{ broken"]


def test_a_system_column_is_the_system_message_of_whole_conversations_too(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    row = {"sys": "Be brief.", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
    (found,) = read(tmp_path, row, system_column="sys")
    assert found.prompt == [system, USER]
    with pytest.raises(DataError, match="is a second system message"):
        read(tmp_path, row | {"chosen": [system, USER, RIGHT], "rejected": [system, USER, WRONG]}, system_column="sys")


@pytest.mark.parametrize("label", ["label", "kto_tag"])
def test_single_conversations_with_a_label(tmp_path: Path, label: str) -> None:
    (found,) = read(tmp_path, {"messages": [USER, RIGHT], label: True}, method="kto")
    assert found.prompt == [USER] and found.completions == ([RIGHT],)


@pytest.mark.parametrize(
    ("row", "how", "unread"),
    [
        ({"system": "Be brief.", **PAIR}, {}, ["data.system_column=system"]),
        ({"input": "2+2?", "instruction": "Add", "chosen": "4", "rejected": "5"}, {}, ["data.query_column=input"]),
        ({"system": "Be brief.", **PAIR}, {"system_column": "system"}, []),
        ({"input": "2+2?", "chosen": "4", "rejected": "5"}, {}, []),  # it is the prompt
    ],
)
def test_columns_that_are_part_of_a_prompt_and_not_read(
    tmp_path: Path, row: dict[str, Any], how: dict[str, Any], unread: list[str]
) -> None:
    found = list(unread_columns(config(tmp_path, row, **how).data, PROMPT))
    assert len(found) == len(unread) and all(text in said for text, said in zip(unread, found, strict=True))


def test_prompt_of_several_turns_is_what_both_sides_begin_with(tmp_path: Path) -> None:
    begin = [USER, RIGHT, {"role": "user", "content": "sure?"}]
    yes, no = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    (found,) = read(tmp_path, {"chosen": [*begin, yes], "rejected": [*begin, no]})
    assert found.prompt == begin
    assert found.completions == ([yes], [no])


def test_a_transcript_of_several_turns_and_one_alone(tmp_path: Path) -> None:
    begin = "\n\nHuman: 2+2?\n\nAssistant: 4\n\nHuman: sure?\n\nI am not: you know.\n\nAssistant: "
    asked = [USER, RIGHT, {"role": "user", "content": "sure?\n\nI am not: you know."}]
    (found,) = read(tmp_path, {"chosen": begin + "yes", "rejected": begin + "no"})
    assert found.prompt == asked
    assert found.completions == tuple([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    (found,) = read(tmp_path, {"completion": begin + "yes", "label": True}, method="kto")
    assert found.prompt == asked and found.completions == ([{"role": "assistant", "content": "yes"}],)


def test_texts_that_only_look_like_transcripts_stay_texts(tmp_path: Path) -> None:
    row = {
        "prompt": "Human: is that a name?",
        "chosen": "\n\nAssistant: yes",
        "rejected": "No.\n\nHuman: ...\n\nAssistant: a",
    }
    (found,) = read(tmp_path, row)
    assert found.prompt == [{"role": "user", "content": row["prompt"]}]
    assert [side[0]["content"] for side in found.completions] == [row["chosen"], row["rejected"]]


def test_prompts_in_texts_end_between_words_and_are_reported(tmp_path: Path) -> None:
    rows = [
        {"chosen": "The sky is grey.", "rejected": "The sky is green.", "margin": 1},
        {"chosen": "2+2=4", "rejected": "2+2=5", "margin": 2},
        {"chosen": "It was\nred", "rejected": "It was\nred and blue", "margin": 3},
    ]
    found = [
        (row.prompt[0]["content"], [side[0]["content"] for side in row.completions]) for row in read(tmp_path, *rows)
    ]
    assert found == [
        ("The sky is", ["grey.", "green."]),
        ("2+2=", ["4", "5"]),
        ("It was", ["red", "red and blue"]),
    ]
    (said,) = prompts_in_texts(config(tmp_path, *rows))
    assert said.startswith("rows.jsonl has no column with the prompt")
    assert not list(prompts_in_texts(config(tmp_path, PAIR)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "blue", "rejected": "red"}, "column rejected begins with other words than the chosen side"),
        ({"chosen": "so", "rejected": "so!"}, "holds only the words that both begin with"),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "column rejected begins with other words"),
    ],
)
def test_texts_without_a_prompt_in_them(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, {"chosen": "2+2? 4", "rejected": "2+2? 5"}, row)


def test_answers_are_no_prompts_where_another_column_may_hold_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column prompt or question"):
        read(tmp_path, {"query": "2+2?", "chosen": "it is 4", "rejected": "it is 5"})


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "True", "1.0"])
def test_single_completions(tmp_path: Path, label: Any) -> None:
    rows = [
        {"prompt": "2+2?", "completion": "4", "label": label},
        {"prompt": "2+2?", "completion": "5", "label": False},
    ]
    found = read(tmp_path, *rows, method="kto")
    assert [(row.completions, row.desirable) for row in found] == [(([RIGHT],), True), (([WRONG],), False)]


@pytest.mark.parametrize("more", [{}, {"label": 1}])
def test_pairs_are_taken_apart_for_a_method_of_single_completions(tmp_path: Path, more: dict[str, Any]) -> None:
    found = read(tmp_path, PAIR | more, method="kto")
    assert [(row.number, row.completions, row.desirable) for row in found] == [
        (0, ([RIGHT],), True),
        (0, ([WRONG],), False),
    ]


def test_margins_and_reference_columns(tmp_path: Path) -> None:
    (found,) = read(tmp_path, PAIR | {"margin": 2}, method="reward_model")
    assert found.margin == 2.0
    named = PAIR | {"c": -1.5, "r": -2.5}
    (found,) = read(tmp_path, named, reference_columns=["c", "r"])
    assert found.ref_logps == (-1.5, -2.5)


BAD = [
    (PAIR | {"rejected": "4"}, {}, "column rejected holds the same as column chosen"),
    (PAIR | {"rejected": " "}, {}, "column rejected holds an empty text"),
    (PAIR | {"chosen": None}, {}, "column chosen holds nothing"),
    (PAIR | {"rejected": []}, {}, "column rejected holds a list of 0"),
    (PAIR | {"images": ["cat.png"]}, {}, "column images holds image 0 that is not there"),
    (PAIR | {"prompt": ""}, {}, "column prompt holds an empty text"),
    (PAIR | {"tools": "x{"}, {}, "column tools holds 'x{'; a list of tools is expected"),
    (PAIR | {"prompt": [USER, RIGHT]}, {}, "column prompt ends with an assistant message"),
    ({"chosen": [USER, RIGHT], "rejected": [USER]}, {}, "column rejected ends with a message of the user"),
    (
        {"chosen": [USER, RIGHT], "rejected": [WRONG, USER, WRONG]},
        {},
        "begins with other messages than the chosen side",
    ),
    ({"chosen": [RIGHT], "rejected": [WRONG]}, {}, "there is no column with the prompt"),
    (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c"},
        {},
        "column rejected ends with a message of the user",
    ),
    (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"},
        {},
        "begins with other messages than the chosen side",
    ),
    (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"},
        {},
        "column rejected holds an empty text",
    ),
    ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "b"}, {}, "begins with other messages"),
    (PAIR | {"margin": "much"}, {"method": "reward_model"}, "column margin holds 'much'; a number is expected"),
    (PAIR | {"margin": 10**400}, {"method": "reward_model"}, "a number is expected"),
    (PAIR | {"margin": -1e300}, {"method": "reward_model"}, "column margin holds -1e+300; numbers end at 3.4e+38"),
    (PAIR | {"margin": None}, {"method": "reward_model"}, "column margin holds nothing; a number is expected"),
    (PAIR | {"prompt": None}, {}, "column prompt holds nothing; a text or a list of chat messages is expected"),
    (PAIR | {"c": 0.5, "r": -1}, {"reference_columns": ["c", "r"]}, "the log-prob of a completion is not above 0"),
    (
        {"prompt": "2+2?", "completion": "4", "label": "good"},
        {"method": "kto"},
        "column label holds 'good'; true or false",
    ),
    ({"prompt": "2+2?", "completion": "4", "label": None}, {"method": "kto"}, "column label holds nothing"),
]


@pytest.mark.parametrize(("row", "how", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], how: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, *([PAIR] if "prompt" in row and "completion" not in row and not how else []), row, **how)
    (problem,) = caught.value.problems
    assert message in problem.what
    assert re_row(problem.what)
    assert problem.field.startswith("data.")


def re_row(text: str) -> bool:
    return text.startswith(("row 0 of rows.jsonl: ", "row 1 of rows.jsonl: "))


@pytest.mark.parametrize(
    ("row", "how", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, {}, "rows.jsonl has no column rejected (it has prompt, chosen)"),
        ({"chosen": "b", "rejected": "c"}, {}, "has no column prompt or question or instruction"),
        (PAIR, {"chosen_column": "choosen"}, "rows.jsonl has no column choosen"),
        ({"prompt": "a", "completion": "b"}, {"method": "kto"}, "rows.jsonl has no column label"),
        (PAIR, {"reference_columns": ["ref_chosen", "ref_rejected"]}, "has no column ref_chosen"),
    ],
)
def test_missing_columns_are_named(tmp_path: Path, row: dict[str, Any], how: dict[str, Any], message: str) -> None:
    problems, _, _ = check_preference_files(config(tmp_path, row, **how))
    assert message in problems[0].what
    assert problems[0].field.startswith("data.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def test_sides_share_the_prompt_and_end_with_the_end_token(tmp_path: Path, model: str) -> None:
    chosen = config(tmp_path, PAIR, PAIR | {"chosen": "four"}, model=model)
    tokenizer = load_tokenizer(chosen.model)
    rows = load_preferences(chosen.data.train_files, chosen, tokenizer, what="training").rows
    assert [row.name for row in rows] == ["rows.jsonl:0", "rows.jsonl:1"]
    for row in rows:
        starts = [int(side.learned.argmax()) for side in row.sides]
        assert starts[0] == starts[1] > 0
        assert np.array_equal(*(side.token_ids[: starts[0]] for side in row.sides))
        assert all(side.token_ids[-1] == tokenizer.eos_token_id for side in row.sides)
    batch = preference_batch(rows)
    assert batch.sequences.group_index.tolist() == [0, 0, 1, 1]
    scored = preference_batch(rows, scored=True)
    assert scored.loss_mask.sum(dim=1).tolist() == [1, 1, 1, 1]
    assert scored.loss_mask.int().argmax(dim=1).tolist() == batch.sequences.response_lengths.tolist()


def test_conversations_learn_what_follows_the_shared_messages(tmp_path: Path, model: str) -> None:
    again = {"role": "user", "content": "again"}
    row = {"chosen": [USER, RIGHT, again, RIGHT, again, RIGHT], "rejected": [USER, RIGHT, again, WRONG]}
    chosen = config(tmp_path, row, model=model)
    tokenizer = load_tokenizer(chosen.model)
    (found,) = load_preferences(chosen.data.train_files, chosen, tokenizer, what="training").rows
    learned = [tokenizer.decode(side.token_ids[side.learned]) for side in found.sides]
    assert [text.count("4") for text in learned] == [2, 0]
    assert "5" in learned[1]


def test_rows_that_are_too_long(tmp_path: Path, model: str) -> None:
    long = PAIR | {"rejected": "5 " * 200}
    alike = PAIR | {"chosen": "9" * 300 + "a", "rejected": "9" * 300 + "b"}
    for overlong, expected in (("filter", 1), ("truncate_right", 2)):
        chosen = config(tmp_path, PAIR, long, alike, model=model, overlong=overlong, max_tokens=60)
        loaded = load_preferences(chosen.data.train_files, chosen, load_tokenizer(chosen.model), what="training")
        assert len(loaded.rows) == expected
    assert loaded.notes("training") == [
        "2 of 3 training rows are too long and were cut",
        "1 of 3 training rows have nothing to compare after the cut, and are left out",
    ]
    chosen = config(tmp_path, PAIR, long, model=model, max_tokens=60)
    with pytest.raises(DataError, match=r"1 of 2 training rows are longer than 60 tokens: rows\.jsonl:1 has"):
        load_preferences(chosen.data.train_files, chosen, load_tokenizer(chosen.model), what="training")


def test_mismatched_rows_have_the_next_completion(tmp_path: Path, model: str) -> None:
    rows = [{"prompt": f"say {n}", "completion": str(n) * 3, "label": n > 0} for n in range(3)]
    chosen = config(tmp_path, *rows, method="kto", model=model)
    tokenizer = load_tokenizer(chosen.model)
    loaded = load_preferences(chosen.data.train_files, chosen, tokenizer, what="training").rows
    texts = [tokenizer.decode(row.sides[0].token_ids) for row in mismatched(loaded, 1000)]
    assert all(f"say {n}" in text and str((n + 1) % 3) * 3 in text for n, text in enumerate(texts))
    assert max(len(row.sides[0].token_ids) for row in mismatched(loaded, 10)) == 10


def test_the_key_of_a_bad_row_is_that_of_its_column(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, {"chosen": [USER, RIGHT], "rejected": [USER, RIGHT, USER, WRONG]})
    (problem,) = caught.value.problems
    assert "column chosen holds no assistant's message behind the prompt" in problem.what
    assert problem.field == "data.chosen_column"
