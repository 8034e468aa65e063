"""A byte-level BPE tokenizer in GGUF's metadata."""

from __future__ import annotations

import json
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase

from posttrain.errors import ModelError, Problem

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's names of the rules by which text is cut before pairs are merged: the regular expression of a Split.
SPLITS = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Write tokens, merges, special tokens and the chat template; ids without a token, up to vocab_size, as unused ones.

    Raises: ModelError for a tokenizer that is not byte-level BPE, or cuts text in a way that llama.cpp has no name for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(_unknown("has no fast form (tokenizer.json)"))
    state = json.loads(backend.to_str())
    model = state["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ModelError(_unknown(f"is {model['type']}{' with byte fallback' if model.get('byte_fallback') else ''}"))
    if state.get("normalizer") not in (None, {"type": "NFC"}):
        raise ModelError(_unknown(f"normalizes text ({state['normalizer'].get('type')})"))
    writer.add_tokenizer_model("gpt2")
    # Without merges every byte is a token, however text is cut
    writer.add_tokenizer_pre(pre_tokenizer_name(state.get("pre_tokenizer")) if model["merges"] else "gpt-2")
    special = {each["id"]: each["special"] for each in state["added_tokens"]}
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens, types = [], []
    for number in range(max(vocab_size, max(by_id) + 1)):
        known = number in by_id
        tokens.append(by_id[number] if known else f"[PAD{number}]")
        kind = gguf.TokenType.NORMAL if known else gguf.TokenType.UNUSED
        if number in special:
            kind = gguf.TokenType.CONTROL if special[number] else gguf.TokenType.USER_DEFINED
        types.append(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    ids: dict[str, Any] = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    for name, number in ids.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] != [None]
    writer.add_add_bos_token(bool(begins))
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def pre_tokenizer_name(state: dict[str, Any] | None) -> str:
    """llama.cpp's name for a pre-tokenizer. Raises: ModelError when it has none."""
    parts = state["pretokenizers"] if state and state["type"] == "Sequence" else [state or {}]
    last = parts[-1]
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        before = parts[:-1]
        if not before and last.get("use_regex", True):
            return "gpt-2"
        if [each["type"] for each in before] == ["Digits"] and before[0]["individual_digits"] and last["use_regex"]:
            return "smollm"
        if [each["type"] for each in before] == ["Split"] and not last.get("use_regex", True):
            pattern = before[0]["pattern"].get("Regex", "")
            if pattern in SPLITS and before[0]["behavior"] == "Isolated":
                return SPLITS[pattern]
    raise ModelError(_unknown("cuts text into words in a way that llama.cpp has no name for"))


def _unknown(what: str) -> Problem:
    fix = "convert the exported folder with llama.cpp's convert_hf_to_gguf.py"
    return Problem(f"the tokenizer {what}; only byte-level BPE is written as GGUF here", fix=fix)
