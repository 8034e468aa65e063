"""A byte-pair tokenizer over whole text with spaces as ▁ and bytes for what has no piece (SentencePiece's) in GGUF's metadata.

llama.cpp merges the neighbouring pieces whose union has the highest score. Of two merges the one that stands earlier in the list
is made first, so a piece's score is the rank of its first merge, negated.
"""

from __future__ import annotations

import json
import re
from typing import Any

import gguf
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

SPACE = "▁"
UNMERGED = -1e9
PHI3 = re.compile("phi-?3", re.IGNORECASE)
OF_PHI3 = {"<unk>", "<s>", "</s>", "<|endoftext|>"}


def space_in_front(state: dict[str, Any]) -> bool | None:
    """Return True where a text gets a space in front of it, False where not; None where text is prepared in another way.

    Args: ``state`` of the tokenizer (tokenizer.json).
    """
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizer, before = state.get("normalizer"), state.get("pre_tokenizer")
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    # Gemma's cuts at spaces, of which the step before left none
    no_cut = before is None or (before["type"] == "Split" and before["pattern"] == {"String": " "})
    if no_cut and steps == [replaced]:
        return False
    if no_cut and steps == [{"type": "Prepend", "prepend": SPACE}, replaced]:
        return True
    if normalizer is None and before is not None and before["type"] == "Metaspace" and not before.get("split"):
        in_front = {"always": True, "never": False}
        return in_front.get(before["prepend_scheme"]) if before["replacement"] == SPACE else None
    return None


def general_name(name: str, state: dict[str, Any]) -> str:
    """The model's name in its file, by which llama.cpp knows Phi-3 and drops the blanks behind marks, as its tokenizer does.

    Under such a name llama.cpp asks for four tokens, and does not load a file without them; so no other model gets the name.
    """
    tokens = state["model"]["vocab"].keys() | {each["content"] for each in state["added_tokens"]}
    drops = any(each["special"] and each["rstrip"] for each in state["added_tokens"])
    if drops and tokens >= OF_PHI3:
        return name if PHI3.search(name) else f"Phi-3 {name}"
    return PHI3.sub("phi 3", name)


def drop_blanks(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Drop the blanks behind the marks of a model that is called so, as llama.cpp does."""
    if not PHI3.search(name):
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for each in state["added_tokens"]:
        each["rstrip"] = each["special"] and each["content"] not in OF_PHI3 - {"</s>"}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def write_pieces(writer: gguf.GGUFWriter, state: dict[str, Any], tokens: list[str], in_front: bool) -> None:
    """Write the pieces, their kinds and scores. Args: ``tokens`` by id, with names for ids that have no piece."""
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in state["model"]["merges"]]
    rank: dict[str, int] = {}
    for number, pair in enumerate(merges):
        rank.setdefault("".join(pair), number)
    known = state["model"]["vocab"].keys()
    added = {each["content"]: each["special"] for each in state["added_tokens"]}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-rank[token]) if token in rank else UNMERGED for token in tokens])
    writer.add_token_types([_kind(token, token in known or token in added, added, state) for token in tokens])
    # For other readers: llama.cpp goes by the scores
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_add_space_prefix(in_front)


def _kind(token: str, exists: bool, added: dict[str, bool], state: dict[str, Any]) -> gguf.TokenType:
    if not exists:
        return gguf.TokenType.UNUSED
    if token == state["model"].get("unk_token"):
        return gguf.TokenType.UNKNOWN
    if added.get(token):
        return gguf.TokenType.CONTROL
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return gguf.TokenType.BYTE
    # Looked for in the text as it is, which has no ▁: such a token is only ever merged
    return gguf.TokenType.USER_DEFINED if token in added and SPACE not in token else gguf.TokenType.NORMAL
