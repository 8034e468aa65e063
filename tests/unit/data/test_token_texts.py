"""The text of single tokens."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from posttrain.data.token_texts import token_texts_of


class SentencePiece:
    """A decoder that drops the space that begins a text, as SentencePiece's do."""

    pieces = {1: "▁a", 2: "▁the", 3: "re", 4: ""}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert (text, add_special_tokens) == ("a", False)
        return [1]

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return "".join(self.pieces[number] for number in ids).replace("▁", " ").removeprefix(" ")


def test_spaces_and_special_tokens_are_kept(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = tokenizer.encode("a the <|im_end|>", add_special_tokens=False)
    texts = token_texts_of(tokenizer)(ids)
    assert "".join(texts) == "a the <|im_end|>" and texts[-1] == "<|im_end|>"


def test_a_part_of_a_character_and_an_unknown_id_are_shown(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    (first, second) = tokenizer.encode("é", add_special_tokens=False)  # two bytes, a token each
    beyond = len(tokenizer) + 5
    assert token_texts_of(tokenizer)([first, second, beyond]) == ["\ufffd", "\ufffd", f"<id {beyond}>"]


def test_the_space_before_a_word_is_not_lost() -> None:
    assert token_texts_of(SentencePiece())([2, 3, 4]) == [" the", "re", "<id 4>"]  # type: ignore[arg-type]
