from __future__ import annotations

import copy
import logging

import pytest

from posttrain.data.templates import apply_template, check_template
from posttrain.errors import DataError, ModelError

MESSAGES = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w0 w1"}]


def test_template_is_applied_once_with_one_bos(tokenizer):
    text, ids = apply_template(tokenizer, MESSAGES, {})

    assert text == "<s><|im_start|>system w5<|im_end|><|im_start|>user w0 w1<|im_end|><|im_start|>assistant"
    #      <s> start system w5 end start user w0 w1 end start assistant
    assert ids == [0, 1, 5, 13, 2, 1, 4, 8, 9, 2, 1, 6]
    # what the tokenizer itself makes of the messages, and the double <s> that encoding the text again would give
    assert ids == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokenizer(text)["input_ids"] == [0, *ids]


def test_a_long_prompt_brings_no_warning_of_the_tokenizers_own(tokenizer, logged, monkeypatch):
    monkeypatch.setattr(tokenizer, "model_max_length", 3)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # so that the root logger has it

    apply_template(tokenizer, MESSAGES, {})
    assert not logged

    tokenizer("w0 w1 w0 w1", add_special_tokens=False)  # the one it would give
    assert "longer than the specified maximum" in logged[-1].getMessage()


def test_template_options_reach_the_template(tokenizer):
    text, ids = apply_template(tokenizer, MESSAGES, {"polite": True})

    assert text.endswith("<|im_start|>assistant please")
    assert ids[-2:] == [6, 7]


def test_tokenizer_without_template_and_options_that_are_ours(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None

    problems = check_template(plain, {"tokenize": True, "polite": True})

    assert [problem.field for problem in problems] == [
        "model.chat_template_file",
        "data.chat_template_options.tokenize",
    ]
    with pytest.raises(ModelError, match=r"no chat template.*model\.chat_template_file"):
        apply_template(plain, MESSAGES, {})


def test_what_a_template_refuses_is_a_data_error(tokenizer):
    with pytest.raises(DataError, match="no robots"):
        apply_template(tokenizer, [{"role": "robot", "content": "w0"}], {})


def test_a_template_that_is_none_is_the_models_fault_and_not_a_rows(tokenizer):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{% for message in messages %}\n{{ message.content }}"
    with pytest.raises(ModelError, match=r"the chat template cannot be read: .*endfor.*, in its line \d"):
        apply_template(broken, [{"role": "user", "content": "a"}], {})
    broken.name_or_path = "/models/mine"
    with pytest.raises(ModelError, match=r"mend it \(the tokenizer's own is in /models/mine\)"):
        apply_template(broken, [{"role": "user", "content": "a"}], {})
