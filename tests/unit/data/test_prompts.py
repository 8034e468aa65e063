from __future__ import annotations

import copy
import json

import pytest

from posttrain.data.prompts import cut, file_labels, load_prompts
from posttrain.errors import DataError, ModelError


@pytest.fixture
def three_files(tmp_path, row):
    """Rows of 2, 5, 1 and 3 words. The template adds <s> start user … end start assistant: 6 tokens to the words."""
    (tmp_path / "b").mkdir()
    contents = {"a.jsonl": ["w0 w1", "w0 w1 w2 w3 w4"], "b/a.jsonl": ["w0"], "b/c.jsonl": ["w0 w1 w2"]}
    for name, words in contents.items():
        (tmp_path / name).write_text("".join(json.dumps(row(text, truth=text)) + "\n" for text in words))
    return [str(tmp_path / name) for name in contents]


def test_prompts_in_order_with_names_that_tell_files_apart(three_files, data_config, tokenizer, tmp_path):
    made = load_prompts(three_files, data_config(), tokenizer, what="training")

    assert [len(prompt.token_ids) for prompt in made.prompts] == [8, 11, 7, 9]
    folder = tmp_path.name
    assert [prompt.prompt_id for prompt in made.prompts] == [
        f"{folder}/a.jsonl:0",
        f"{folder}/a.jsonl:1",
        "b/a.jsonl:0",
        "b/c.jsonl:0",
    ]
    first = made.prompts[0]
    assert first.token_ids == (0, 1, 4, 8, 9, 2, 1, 6)
    assert first.text == "<s><|im_start|>user w0 w1<|im_end|><|im_start|>assistant"
    assert (first.data_source, first.ground_truth, first.extra_info) == (
        "sums",
        "w0 w1",
        {"split": "train", "index": 0},
    )
    assert (made.rows, made.dropped, made.truncated) == (4, 0, 0)
    assert made.overlong_message("training") == []


@pytest.mark.parametrize("workers", [1, 2])
def test_data_sources_have_templates_of_their_own(tmp_path, row, data_config, tokenizer, workers: int):
    """The rows of sums are rendered by another template, those of words by the tokenizer's."""
    rows = [row("w0 w1", truth="a"), row("w0 w1", truth="a") | {"data_source": "words"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    options = {"sums": {"chat_template": "{% for message in messages %}{{ message['content'] }} w3{% endfor %}"}}
    data = data_config(source_template_options=options, filter_workers=workers)
    first, second = load_prompts([str(tmp_path / "a.jsonl")], data, tokenizer, what="training").prompts
    assert first.text == "w0 w1 w3"
    assert second.text == "<s><|im_start|>user w0 w1<|im_end|><|im_start|>assistant"


def test_options_that_are_not_the_users_are_refused_for_a_data_source_too(three_files, data_config, tokenizer):
    data = data_config(source_template_options={"sums": {"tokenize": True}})
    with pytest.raises(ModelError) as caught:
        load_prompts(three_files, data, tokenizer, what="training")
    [problem] = caught.value.problems
    assert (problem.field, problem.what) == ("data.source_template_options.sums", "tokenize is set by posttrain")


def test_file_labels():
    assert file_labels(["x/train.parquet", "y/val.parquet"]) == ["train.parquet", "val.parquet"]
    assert file_labels(["x/t.parquet", "y/t.parquet"]) == ["x/t.parquet", "y/t.parquet"]
    assert file_labels(["x/t.parquet", "x/t.parquet"]) == ["t.parquet", "t.parquet#2"]


def test_overlong_prompts_are_an_error_with_count_rows_and_lengths(three_files, data_config, tokenizer):
    with pytest.raises(DataError) as caught:
        load_prompts(three_files, data_config(max_prompt_tokens=8), tokenizer, what="training")

    [problem] = caught.value.problems
    assert "2 of 4 training prompts are longer than 8 tokens" in problem.what
    assert "a.jsonl:1 has 11, b/c.jsonl:0 has 9; the longest has 11" in problem.what
    assert problem.field == "data.max_prompt_tokens"


def test_overlong_prompts_are_filtered_and_counted(three_files, data_config, tokenizer):
    data = data_config(max_prompt_tokens=8, overlong_prompts="filter")

    made = load_prompts(three_files, data, tokenizer, what="validation")

    assert [prompt.ground_truth for prompt in made.prompts] == ["w0 w1", "w0"]
    assert (made.rows, made.dropped, made.truncated) == (4, 2, 0)
    assert made.overlong_message("training") == ["2 of 4 training prompts are too long and were left out"]


def test_nothing_left_after_filtering_is_an_error(three_files, data_config, tokenizer):
    data = data_config(max_prompt_tokens=6, overlong_prompts="filter")

    with pytest.raises(DataError, match=r"no validation prompt is left: all 4 .* \(the shortest has 7\)"):
        load_prompts(three_files, data, tokenizer, what="validation")


@pytest.mark.parametrize(
    ("how", "ids", "text"),
    [
        # of <s> start user w0 w1 w2 w3 w4 end start assistant, 11 tokens
        ("truncate_left", (12, 2, 1, 6), "w4 <|im_end|> <|im_start|> assistant"),
        ("truncate_right", (0, 1, 4, 8), "<s> <|im_start|> user w0"),
        ("truncate_middle", (0, 1, 1, 6), "<s> <|im_start|> <|im_start|> assistant"),  # 4 // 2 = 2 from either end
    ],
)
def test_overlong_prompts_are_cut(three_files, data_config, tokenizer, how, ids, text):
    data = data_config(max_prompt_tokens=4, overlong_prompts=how)

    made = load_prompts(three_files, data, tokenizer, what="training")

    assert made.prompts[1].token_ids == ids
    assert made.prompts[1].text == text
    assert (made.rows, made.dropped, made.truncated) == (4, 0, 4)
    assert made.overlong_message("validation") == ["4 of 4 validation prompts are too long and were cut"]


def test_cut_by_hand():
    ids = [0, 1, 2, 3, 4, 5]
    assert cut(ids, 5, "truncate_left") == [1, 2, 3, 4, 5]
    assert cut(ids, 5, "truncate_right") == [0, 1, 2, 3, 4]
    assert cut(ids, 5, "truncate_middle") == [0, 1, 3, 4, 5]  # first floor(5 / 2) = 2, last 5 - 2 = 3
    assert cut(ids, 1, "truncate_middle") == [5]  # first 0, last 1
    assert cut(ids, 6, "truncate_left") == ids


def test_bad_rows_of_all_files_are_reported_together(three_files, data_config, tokenizer, row, tmp_path):
    for name in ("p.jsonl", "q.jsonl"):
        (tmp_path / name).write_text(json.dumps(row(prompt=[])) + "\n")

    with pytest.raises(DataError) as caught:
        load_prompts(
            [str(tmp_path / "p.jsonl"), *three_files, str(tmp_path / "q.jsonl")],
            data_config(),
            tokenizer,
            what="training",
        )

    assert [problem.what[:17] for problem in caught.value.problems] == ["row 0 of p.jsonl:", "row 0 of q.jsonl:"]


def test_a_row_that_the_template_refuses_is_named(data_config, tokenizer, row, tmp_path):
    robot = row(prompt=[{"role": "robot", "content": "w0"}])
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(item) for item in [row(), robot]))

    with pytest.raises(DataError, match=r"row 1 of a\.jsonl: the chat template refuses it: TemplateError: no robots"):
        load_prompts([str(tmp_path / "a.jsonl")], data_config(), tokenizer, what="training")


def test_tokenizer_without_template_is_said_before_files_are_read(data_config, tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None

    with pytest.raises(ModelError, match=r"model\.chat_template_file"):
        load_prompts(["no-such-file.parquet"], data_config(), plain, what="training")


@pytest.mark.slow
def test_worker_processes_give_the_same_prompts_in_the_same_order(data_config, tokenizer, row, tmp_path):
    # 600 rows: three chunks for two workers
    lines = [json.dumps(row(" ".join(f"w{i % 20}" for i in range(n % 7 + 1)), truth=str(n))) for n in range(600)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / "a.jsonl")]
    limits = {"max_prompt_tokens": 11, "overlong_prompts": "filter", "chat_template_options": {"polite": True}}

    alone = load_prompts(files, data_config(**limits), tokenizer, what="training")
    together = load_prompts(files, data_config(**limits, filter_workers=2), tokenizer, what="training")

    assert together == alone
    # words + 6 + please <= 11 keeps 1 to 4 words, n % 7 in 0..3: 4 of every 7 rows; 600 = 85 x 7 + 5, so 85 x 4 + 4
    assert len(together.prompts) == 344
