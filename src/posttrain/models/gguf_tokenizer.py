"""A tokenizer in GGUF's metadata: byte-level BPE here, pieces with spaces as ▁ in gguf_pieces.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from posttrain.errors import ModelError, Problem
from posttrain.models.gguf_layout import open_file
from posttrain.models.gguf_pieces import drop_blanks, general_name, space_in_front, write_pieces

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's names of the rules by which text is cut before pairs are merged: the regular expression of a Split.
SPLITS = {_WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORDS + r"\p{N}" + _REST: "qwen2"}


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, name: str) -> None:
    """Write the model's name, on which llama.cpp's tokenizer depends, tokens, merges, special tokens and the chat template.

    Ids without a token, up to vocab_size, are written as unused ones.

    Raises: ModelError for a tokenizer that is neither byte-level BPE nor one of pieces, or that cuts text in a way that llama.cpp
        has no name for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(_unknown("has no fast form (tokenizer.json)"))
    state = json.loads(backend.to_str())
    model = state["model"]
    writer.add_name(general_name(name, state))
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(max(vocab_size, max(by_id) + 1))]
    if model["type"] == "BPE" and model.get("byte_fallback"):
        in_front = space_in_front(state)
        if in_front is None:
            raise ModelError(_unknown("prepares text in a way that llama.cpp has no name for"))
        write_pieces(writer, state, tokens, in_front)
    else:
        _write_byte_level(writer, state, tokens)
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


def _write_byte_level(writer: gguf.GGUFWriter, state: dict[str, Any], tokens: list[str]) -> None:
    model = state["model"]
    if model["type"] != "BPE":
        raise ModelError(_unknown(f"is {model['type']}"))
    if state.get("normalizer") not in (None, {"type": "NFC"}):
        raise ModelError(_unknown(f"normalizes text ({state['normalizer'].get('type')})"))
    writer.add_tokenizer_model("gpt2")
    # Without merges every byte is a token, however text is cut
    writer.add_tokenizer_pre(pre_tokenizer_name(state.get("pre_tokenizer")) if model["merges"] else "gpt-2")
    special = {each["content"]: each["special"] for each in state["added_tokens"]}
    known = model["vocab"].keys() | special.keys()
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[special.get(each)] if each in known else gguf.TokenType.UNUSED for each in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])


def read_tokenizer(file: Path, *, own: bool) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a file that stands in a folder of its own. Args: ``own``, the configuration is one of gguf_settings.

    Raises: OSError, ValueError, KeyError of transformers.
    """
    fields = open_file(file).fields
    said = {name.removeprefix("tokenizer.ggml."): field for name, field in fields.items() if "tokenizer.ggml." in name}
    if (own or "merges" not in said) and "model" in said and said["model"].contents() == "gpt2":
        return _read_bytes(fields, said)
    if not own:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        return found
    # AutoTokenizer asks for the file's configuration first
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    if "general.name" in fields:
        drop_blanks(tokenizer, fields["general.name"].contents())
    return tokenizer


def _read_bytes(
    fields: Mapping[str, gguf.ReaderField], said: Mapping[str, gguf.ReaderField]
) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes. transformers wants merges, where GGUF has no empty lists, and reads some architectures only."""
    merges = [tuple(pair.split(" ")) for pair in said["merges"].contents()] if "merges" in said else []
    cutting = said["pre"].contents() if merges else "bytes"
    tokens, kinds = said["tokens"].contents(), said["token_type"].contents()
    whole = [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
    vocab = {token: n for n, token in enumerate(tokens)}  # the special ones as well, which keep their ids so
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cutting == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizer_called(cutting)
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in whole:
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == gguf.TokenType.CONTROL)])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    marks = {
        f"{name}_token": tokens[said[f"{key}_token_id"].contents()]
        for name, key in names.items()
        if f"{key}_token_id" in said
    }
    template = fields.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=None if template is None else template.contents(),
        clean_up_tokenization_spaces=False,
        **marks,
    )


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


def pre_tokenizer_called(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that ``pre_tokenizer_name`` calls so; ``bytes`` cuts nothing. Raises: ValueError for another name."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = {called: pattern for pattern, called in SPLITS.items()}
    if name in splits:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(splits[name]), "isolated"), whole])
    known: dict[str, pre_tokenizers.PreTokenizer] = {"bytes": whole, "gpt-2": words}
    known["smollm"] = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name not in known:
        raise ValueError(f"the tokenizer cuts text as llama.cpp's {name}, which is not read here")
    return known[name]


def _unknown(what: str) -> Problem:
    fix = "convert the exported folder with llama.cpp's convert_hf_to_gguf.py"
    return Problem(f"the tokenizer {what}; only BPE, of bytes or with byte fallback, is written as GGUF here", fix=fix)
