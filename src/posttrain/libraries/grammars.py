"""The sole importer of llguidance: which tokens keep a response within a grammar."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from posttrain.errors import MissingDependency
from posttrain.registry import missing_library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# White space between the parts of a JSON text. Unbounded, a weak model can write nothing else up to its token limit.
SPACE = r"[ \n]{0,24}"
# Around a mark in the text of a grammar, where it becomes the token of that text in a tokenizer that has one.
_OPEN, _CLOSE, _OR = "\x02", "\x03", "\x04"
_MARK = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)
_ANY_OBJECT = {"type": "object"}


class BadGrammar(ValueError):
    """A schema from which no grammar can be made."""


def is_installed() -> bool:
    return find_spec("llguidance") is not None


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """Return the grammar of JSON texts that a JSON schema allows; None: of all objects.

    Raises: BadGrammar with the reason; MissingDependency without llguidance.
    """
    matcher = _library().LLMatcher
    text = json.dumps(_ANY_OBJECT if schema is None else schema)
    try:
        grammar: str = matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACE})
    except ValueError as error:
        raise BadGrammar(str(error)) from None
    check_grammar(grammar)
    return grammar


def check_grammar(grammar: str) -> None:
    """Raises: BadGrammar with the reason where a grammar cannot be followed; MissingDependency without llguidance."""
    failed, messages = _library().LLMatcher.validate_grammar_with_warnings(_with_marks(grammar, {}))
    if failed or messages:  # a warning is of a keyword that would have no effect
        raise BadGrammar("; ".join(messages)[:400])


def literal(text: str) -> str:
    """Return the expression of a grammar for this text."""
    return json.dumps(text, ensure_ascii=False)


def marked(*texts: str) -> str:
    """Return the expression of a grammar for a mark: the one token that is the first of these texts that a tokenizer has a token
    for, and where it has none, the first text in any tokens."""
    return f"{_OPEN}{_OR.join(texts)}{_CLOSE}"


def _with_marks(grammar: str, tokens: Mapping[str, int]) -> str:
    """Replace the marks of a grammar. Args: tokens, ids by their text."""

    def written(found: re.Match[str]) -> str:
        texts = found.group(1).split(_OR)
        return next((f"<[{tokens[text]}]>" for text in texts if text in tokens), literal(texts[0]))

    return _MARK.sub(written, grammar)


class Grammars:
    """Grammars over the tokens of a tokenizer. Making it takes about a second.

    Args: tokenizer, of transformers (not its type: a plan imports this module); vocabulary, the number of logits; end_tokens,
        those that end a response where the grammar is complete.
    Raises: BadGrammar for tokenizers that the library cannot read; MissingDependency without llguidance.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Collection[int]):
        from_tokenizer = _library("llguidance.hf").from_tokenizer
        self.vocabulary = vocabulary
        self._tokens = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(end_tokens))
        except ValueError as error:
            raise BadGrammar(f"the tokenizer cannot be used with grammars: {error}") from None

    def begin(self, grammar: str) -> GrammarPlace:
        """Begin a response."""
        written = _with_marks(grammar, self._tokens)
        return GrammarPlace(_library().LLMatcher(self._tokenizer, written, log_level=0), self.vocabulary)


class GrammarPlace:
    """The place in a grammar that a response has reached."""

    def __init__(self, matcher: Any, vocabulary: int):
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def problem(self) -> str:
        """The reason why the grammar cannot be followed further, such as a limit on its size; "" without one."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else ""

    def allowed(self) -> NDArray[np.bool_]:
        """Return the tokens that may come next, [vocabulary]; all of them where there is a problem."""
        import numpy as np  # a plan imports this module, and needs no arrays

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self.problem:
            return np.ones(self._vocabulary, dtype=np.bool_)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(np.bool_)

    def take(self, token: int) -> None:
        """Take the token that was drawn."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


@functools.cache
def _library(module: str = "llguidance") -> Any:
    if not is_installed():
        raise MissingDependency(missing_library("llguidance", "response_format and tool_choice"))
    return importlib.import_module(module)
