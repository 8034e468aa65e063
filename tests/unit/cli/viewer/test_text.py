"""Reading, choosing, ordering, comparing and cleaning samples: what the viewer does without a screen."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.viewer.sample_file import SampleFile
from posttrain.cli.viewer.search import chosen, conditions
from posttrain.cli.viewer.words import MAX_CHARS, MAX_COMPARED_WORDS, MAX_LINE, one_line, shown, visible, word_diff

ROWS: list[dict[str, Any]] = [
    {"reward": 0.5, "advantage": 1.0, "response_tokens": 9, "stop_reason": "eos", "response": "Four"},
    {"reward": 1.0, "advantage": -1.0, "response_tokens": 3, "stop_reason": "length", "prompt": "four?"},
    {"reward": None, "invalid": {"reason": "timeout"}, "response_tokens": 4, "response": "5"},
    {"reward": 0.0, "reward_terms": {"math": 2}, "data_source": "gsm8k", "response": "six"},
]


@pytest.fixture
def samples(tmp_path: Path) -> SampleFile:
    path = tmp_path / "step_1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return SampleFile(path)


class TestSampleFile:
    def test_rows_by_number(self, samples: SampleFile) -> None:
        assert len(samples) == 4
        assert samples[1] == ROWS[1] and samples[-1] == ROWS[3] and samples[1:3] == ROWS[1:3]
        with pytest.raises(IndexError):
            samples[4]

    def test_damage_is_a_row_of_its_own(self, tmp_path: Path) -> None:
        path = tmp_path / "step_1.jsonl"
        path.write_bytes(b'{"reward": 1}\n\n[1]\nhalf a li\xff\n{"reward": 2')  # an empty line is none
        found = SampleFile(path)
        assert found[:] == [{"reward": 1}, {"damaged": "[1]"}, {"damaged": "half a li�"}, {"damaged": '{"reward": 2'}]

    def test_an_empty_file_has_no_rows(self, tmp_path: Path) -> None:
        (tmp_path / "step_1.jsonl").write_text("")
        assert list(SampleFile(tmp_path / "step_1.jsonl")) == []

    def test_opening_ten_thousand_samples_parses_none(self, tmp_path: Path) -> None:
        path = tmp_path / "step_1.jsonl"
        path.write_text((json.dumps({"response": "x" * 2000}) + "\n") * 10_000)  # 20 MB
        start = time.process_time()
        assert len(SampleFile(path)) == 10_000
        assert time.process_time() - start < 0.5  # 0.02 s on a machine at rest


class TestSearch:
    @pytest.mark.parametrize(
        ("asked", "found"),
        [
            ("", [0, 1, 2, 3]),
            ("four", [0, 1]),  # in the response of one and the prompt of the other, whatever the case
            ("FOUR stop=eos", [0]),
            ("reward>=0.5", [0, 1]),
            ("reward!=1", [0, 3]),  # a sample without a reward has none to compare
            ("tokens<5", [1, 2]),
            ("term.math=2", [3]),
            ("source=gsm8k", [3]),
            ("source!=gsm8k", [0, 1, 2]),
            ("invalid", [2]),
            ("invalid reward=0", []),
        ],
    )
    def test_what_is_found(self, samples: SampleFile, asked: str, found: list[int]) -> None:
        assert list(chosen(samples, asked)) == found

    def test_orders_put_samples_without_the_number_last(self, samples: SampleFile) -> None:
        assert list(chosen(samples, order="reward")) == [3, 0, 1, 2]
        assert list(chosen(samples, order="reward", descending=True)) == [1, 0, 3, 2]
        assert list(chosen(samples, "reward>=0", "tokens")) == [1, 0, 3]
        assert list(chosen(samples, descending=True)) == [3, 2, 1, 0]

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ("rewrd>1", "there is no rewrd to compare; known: reward, advantage"),
            ("reward>high", "high is no number: reward>high"),
            ("stop>eos", "stop is a word: use stop=eos or stop!=eos"),
        ],
    )
    def test_wrong_conditions_are_told(self, asked: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            conditions(asked)


class TestWords:
    def test_control_characters_become_signs(self) -> None:
        assert visible("\x1b[31mred\x07\r\n\tend\x7f") == "␛[31mred␇\n    end<U+007F>"
        assert visible("a\u202eb\u2066c\u200fd\x9be") == "a<U+202E>b<U+2066>c<U+200F>d<U+009B>e"
        assert visible("\ud800") == "<U+D800>"
        assert visible("שלום e\u0301 数学 😀") == "שלום e\u0301 数学 😀"  # letters stay

    def test_long_texts_are_cut_and_long_lines_broken(self) -> None:
        text = shown("x" * (MAX_CHARS + 5))
        assert text.endswith("[5 more characters in the file]")
        assert max(map(len, text.split("\n"))) == MAX_LINE
        assert shown("a\n\nb") == "a\n\nb"
        assert one_line("a\n b\x1b" + "c" * 100, 6) == "a b␛cc"

    def test_difference_by_words(self) -> None:
        assert list(word_diff("the cat sat on", "the dog sat on it")) == [
            ("same", "the "),
            ("gone", "cat "),
            ("new", "dog "),
            ("same", "sat on "),
            ("new", "it"),
        ]
        assert list(word_diff("same", "same")) == [("same", "same")]
        assert list(word_diff("", "new")) == [("new", "new")]
        *_, (kind, last) = word_diff("a " * (MAX_COMPARED_WORDS + 1), "a")
        assert kind == "same" and "only the first 1,500 words" in last
