"""Made-up texts of full length, by the name of their module."""

from __future__ import annotations

import pytest

from posttrain.config.sft import SftDataConfig
from posttrain.data.full_length import FullLengthPrompts
from posttrain.data.own_dataset import load_own_texts
from posttrain.data.sft_rows import own_class_file_problems
from posttrain.errors import DataError
from posttrain.models.tiny import tiny_tokenizer

MODULE = "pkg://posttrain.data.full_length"


def data(**changes: object) -> SftDataConfig:
    given = {"train_files": [], "dataset_class_file": MODULE, "dataset_class_name": "FullLengthTexts", "max_tokens": 32}
    return SftDataConfig.model_validate({**given, "dataset_class_options": {"rows": 3, "tokens": 32}, **changes})


def test_every_text_is_as_long_as_a_run_allows() -> None:
    tokenizer = tiny_tokenizer()
    first, second = (load_own_texts([], data(), tokenizer, what="training").texts for _ in range(2))
    assert [len(text.token_ids) for text in first] == [32] * 3
    assert [list(text.token_ids) for text in first] == [list(text.token_ids) for text in second]
    assert len({tuple(text.token_ids) for text in first}) == 3
    assert all(0 <= token < len(tokenizer) for text in first for token in text.token_ids)


def test_every_prompt_is_as_long_as_a_run_allows() -> None:
    tokenizer = tiny_tokenizer()
    first, second = (FullLengthPrompts([], tokenizer, {"rows": 3, "tokens": 24}) for _ in range(2))
    ids = [first[index]["raw_prompt_ids"] for index in range(len(first))]
    assert [len(each) for each in ids] == [24] * 3 and len({tuple(each) for each in ids}) == 3
    assert ids == [second[index]["raw_prompt_ids"] for index in range(3)]
    assert all(0 <= token < len(tokenizer) for each in ids for token in each)


def test_a_module_that_is_not_there_is_named() -> None:
    assert own_class_file_problems(data()) == []
    wrong = data(dataset_class_file="pkg://posttrain.data.full_lenght")
    [problem] = own_class_file_problems(wrong)
    assert problem.field == "data.dataset_class_file" and problem.fix == "did you mean posttrain.data.full_length?"
    with pytest.raises(DataError, match="there is no module"):
        load_own_texts([], wrong, tiny_tokenizer(), what="training")
