"""Prompts whose text holds the markers of a chat template."""

from __future__ import annotations

import json

import pytest

from posttrain.data.check import check_rows
from posttrain.data.prompts import load_prompts
from posttrain.data.templated import marker_in, own_markers
from posttrain.errors import DataError

CHATML = "<|im_start|>system\nYou solve sums.<|im_end|>\n<|im_start|>user\nw0 w1<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        (CHATML, "<|im_start|>system"),
        # TinyZero's and Logic-RL's prompts go on behind the assistant's header.
        (CHATML + "Let me solve this step by step.\n<think>", "<|im_start|>system"),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?",
            "<|start_header_id|>user<|end_header_id|>",
        ),
        ("<s>[INST] 2+2? [/INST]", "[INST]"),
        ("<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n", "<start_of_turn>user"),
        ("<|user|>\n2+2?</s>\n<|assistant|>\n", "<|user|>"),
        ("<\uff5cbegin▁of▁sentence\uff5c><\uff5cUser\uff5c>2+2?<\uff5cAssistant\uff5c><think>\n", "<\uff5cUser\uff5c>"),
        ("2+2?<|im_end|>\n<|im_start|>assistant\nSure <|im_start|>user", "<|im_start|>assistant"),
        ("<|start|>user<|message|>2+2?<|end|><|start|>assistant", "<|start|>user"),
    ],
)
def test_turns_of_well_known_families(text: str, marker: str):
    assert marker_in([{"role": "user", "content": text}]) == marker
    assert marker_in([{"role": "user", "content": [{"type": "text", "text": text}]}]) == marker


@pytest.mark.parametrize(
    "text",
    [
        "What does the marker <|im_start|>user mean?",
        "The tag [INST] opens an instruction.",
        "User: 2+2?\nAssistant: <think>",
        "Write <|endoftext|> behind each line, and put x in <answer> </answer>.",
        "if a < b | c > d: print('[user]')",
    ],
)
def test_plain_texts_and_single_mentions_are_not_templated(text: str):
    assert marker_in([{"role": "user", "content": text}]) == ""


def test_the_tokenizers_own_template_is_known_whatever_its_markers_are(tokenizer, monkeypatch):
    own = "{% for m in messages %}@@{{ m['role'] }}>>{{ m['content'] }}<<{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", own)
    markers = own_markers(tokenizer, {})
    assert markers == ["<<@@assistant>>", "<<@@user>>"]
    assert marker_in([{"role": "user", "content": "@@user>>2+2?<<@@assistant>>"}], markers) == "<<@@assistant>>"
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    assert own_markers(tokenizer, {}) == []  # plain words, which a prompt may hold by itself
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no') }}")
    assert own_markers(tokenizer, {}) == []


@pytest.fixture
def file(tmp_path, row):
    contents = ["w0 w1", "<|im_start|>user w0 w1<|im_end|><|im_start|>assistant w2"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(text)) + "\n" for text in contents))
    return str(path)


def test_templated_rows_are_refused_with_their_names(file, data_config, tokenizer):
    with pytest.raises(DataError) as caught:
        load_prompts([file], data_config(), tokenizer, what="training")
    [problem] = caught.value.problems
    assert "1 of 2 training prompts are templated already" in problem.what
    assert "a.jsonl:1 has <|im_end|><|im_start|>assistant" in problem.what
    assert "data.templated_prompts=raw" in problem.fix
    assert problem.field == "data.templated_prompts"


def test_plan_finds_them_without_a_tokenizer(file, data_config):
    rows, [problem] = check_rows(file, data_config())
    assert rows == 2
    assert "1 of 2 prompts" in problem.what and "a.jsonl:1 has <|im_start|>user" in problem.what
    assert check_rows(file, data_config(templated_prompts="raw")) == (2, [])
    assert check_rows(file, data_config(templated_prompts="wrap")) == (2, [])


@pytest.mark.parametrize("workers", [1, 2])
def test_raw_texts_get_no_template_and_no_further_special_token(file, data_config, tokenizer, workers: int):
    data = data_config(templated_prompts="raw", filter_workers=workers)
    plain, templated = load_prompts([file], data, tokenizer, what="training").prompts
    assert plain.token_ids == (8, 9)
    # <|im_start|> user w0 w1 <|im_end|> <|im_start|> assistant w2
    assert templated.token_ids == (1, 4, 8, 9, 2, 1, 6, 10)


def test_wrap_applies_the_template_around_the_markers(file, data_config, tokenizer):
    data = data_config(templated_prompts="wrap")
    templated = load_prompts([file], data, tokenizer, what="training").prompts[1]
    # <s> <|im_start|> user, the text, <|im_end|> <|im_start|> assistant
    assert templated.token_ids == (0, 1, 4, 1, 4, 8, 9, 2, 1, 6, 10, 2, 1, 6)


def test_raw_needs_one_message_and_no_template(tmp_path, row, data_config, tokenizer, monkeypatch):
    path = tmp_path / "b.jsonl"
    two = [{"role": "system", "content": "w0"}, {"role": "user", "content": "w1"}]
    path.write_text(json.dumps(row("w0")) + "\n" + json.dumps(row("w0") | {"prompt": two}) + "\n")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(DataError, match=r"row 1 of b\.jsonl: .*tokenizes one text, and this prompt has 2 messages"):
        load_prompts([str(path)], data_config(templated_prompts="raw"), tokenizer, what="training")
