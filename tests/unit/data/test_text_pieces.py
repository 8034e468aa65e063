"""Pieces of a text that is being sampled: characters of several tokens, stop texts, and calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from posttrain.data.text_pieces import TextPieces


def of_bytes(token_ids: Sequence[int]) -> str:
    """A token per byte, as a model without larger ones has them."""
    return bytes(token_ids).decode(errors="replace")


def pieces(text: str | bytes, **options: Sequence[str]) -> tuple[list[str], TextPieces]:
    found = TextPieces(of_bytes, **options)
    given = text.encode() if isinstance(text, str) else text
    return [found.add([each]) for each in given], found


def test_characters_come_whole_and_all_pieces_are_the_text() -> None:
    given, _ = pieces("aé€🙂b")  # 1 + 2 + 3 + 4 + 1 bytes: each character comes with its last byte
    assert given == ["a", "", "é", "", "", "€", "", "", "", "🙂", "b"]


def test_bytes_that_are_no_character_come_with_the_next_one_or_at_the_end() -> None:
    given, found = pieces(b"a\xff\xfeb\xff")
    assert given == ["a", "", "", "\ufffd\ufffdb", ""]
    assert found.rest("a\ufffd\ufffdb\ufffd") == "\ufffd"


@pytest.mark.parametrize(
    ("text", "given", "whole", "rest"),
    [
        ("abENx", ["a", "b", "", "", "ENx"], "abENx", ""),  # it was not the stop text
        ("abEND", ["a", "b", "", "", ""], "ab", ""),
        ("abEN", ["a", "b", "", ""], "abEN", "EN"),  # the token limit came first
        ("EEND", ["", "E", "", ""], "E", ""),
    ],
)
def test_what_may_become_a_stop_text_is_held_back(text: str, given: list[str], whole: str, rest: str) -> None:
    found, all_of_it = pieces(text, stops=["END"])
    assert found == given and all_of_it.rest(whole) == rest


def test_text_before_a_call_and_a_call_that_is_none() -> None:
    found, all_of_it = pieces("Hi \n<call>{}", opening=["<call>"])
    assert "".join(found) == "Hi" and all_of_it.rest("Hi") == ""
    assert all_of_it.rest("Hi \n<call>{}") == " \n<call>{}"  # it is malformed, so it belongs to the text
    assert "".join(pieces("a < b\n", opening=["<call>"])[0]) == "a < b"


def test_a_space_that_depends_on_the_token_before_it() -> None:
    """Many tokenizers write no space before the first word of a text."""

    def words(token_ids: Sequence[int]) -> str:
        return " ".join("abc"[each] for each in token_ids)

    found = TextPieces(words)
    assert [found.add([each]) for each in (0, 1, 2)] == ["a", " b", " c"]
