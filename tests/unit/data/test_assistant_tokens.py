"""Which tokens the assistant wrote, token by token, for the chat templates of well-known model families.

The templates in chat_templates/ write what those families' templates write for these conversations, in our own words. The
tokenizer is the tiny model's (a token per byte), with the families' special tokens added: what is learned can be compared as
text, and no border can hide inside a longer token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from posttrain.data.assistant_tokens import Template, answer_spans, conversation_tokens, tokens_of_spans
from posttrain.data.templates import apply_template
from posttrain.errors import DataError
from posttrain.models.tiny import tiny_tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = {  # family -> its special tokens, the end token first and the begin token, if it writes one, second
    "chatml": ["<|im_end|>", "", "<|im_start|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "llama2": ["</s>", "<s>"],
    "mistral": ["</s>", "<s>"],
    "gemma": ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
    "phi3": ["<|endoftext|>", "", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
    "zephyr": ["</s>", "<s>"],
    "vicuna": ["</s>", "<s>"],
    "qwen2_5": ["<|im_end|>", "", "<|im_start|>"],
    "qwen3": ["<|im_end|>", "", "<|im_start|>"],
    "deepseek_r1": ["<|end_of_sentence|>", "<|begin_of_sentence|>", "<|User|>", "<|Assistant|>"],
    "smollm3_markers": ["<|im_end|>", "", "<|im_start|>"],
    "granite": ["<|end_of_text|>", "", "<|start_of_role|>", "<|end_of_role|>"],
}


def tokenizer_of(family: str) -> Any:
    tokenizer = tiny_tokenizer()
    end, begin, *others = SPECIAL[family]
    tokenizer.add_special_tokens({"eos_token": end, **({"bos_token": begin} if begin else {})})
    tokenizer.add_special_tokens({"extra_special_tokens": others})
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


def parts(tokenizer: Any, ids: Any, learned: Any) -> list[tuple[bool, str]]:
    """Neighbouring tokens that are learned, or not, as texts."""
    found: list[tuple[bool, list[int]]] = []
    for token, is_learned in zip(ids.tolist(), learned.tolist(), strict=True):
        if not found or found[-1][0] != is_learned:
            found.append((is_learned, []))
        found[-1][1].append(token)
    return [(is_learned, tokenizer.decode(tokens)) for is_learned, tokens in found]


def tokens(family: str, messages: list[dict[str, Any]], *, last_only: bool = False, **more: Any) -> list[Any]:
    tokenizer = tokenizer_of(family)
    template = Template(tokenizer=tokenizer, variables=more.pop("variables", {}), **more)
    return parts(tokenizer, *conversation_tokens(template, messages, last_only=last_only))


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """A conversation: user, assistant, user, ..."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return [*first, *({"role": roles[index % 2], "content": text} for index, text in enumerate(texts))]


TWO = turns("Hi", "Hello!", "2+2?", "4")
# (read, learned, read, ...): what each family's template makes of TWO.
EXPECTED = {
    "chatml": [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hello!<|im_end|>",
        "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>", "\n",
    ],
    "llama3": [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "Hello!<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "4<|eot_id|>",
    ],
    "llama2": ["<s>[INST] Hi [/INST]", " Hello! </s>", "<s>[INST] 2+2? [/INST]", " 4 </s>"],
    "mistral": ["<s>[INST] Hi [/INST]", "Hello!</s>", "[INST] 2+2? [/INST]", "4</s>"],
    "gemma": [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "Hello!<end_of_turn>",
        "\n<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n", "4<end_of_turn>", "\n",
    ],
    "phi3": [  # the end of text behind the last message is the template's, not the model's
        "<|user|>\nHi<|end|>\n<|assistant|>\n", "Hello!<|end|>",
        "\n<|user|>\n2+2?<|end|>\n<|assistant|>\n", "4<|end|>", "\n<|endoftext|>",
    ],
    "zephyr": [
        "<|user|>\nHi</s>\n<|assistant|>\n", "Hello!</s>", "\n<|user|>\n2+2?</s>\n<|assistant|>\n", "4</s>", "\n",
    ],
    "vicuna": ["USER: Hi ASSISTANT:", " Hello!</s>", "USER: 2+2? ASSISTANT:", " 4</s>"],
    "qwen2_5": [
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "Hello!<|im_end|>", "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>", "\n",
    ],
    "smollm3_markers": [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hello!<|im_end|>",
        "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>", "\n",
    ],
    "granite": [
        "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "Hello!<|end_of_text|>",
        "\n<|start_of_role|>user<|end_of_role|>2+2?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "4<|end_of_text|>", "\n",
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", EXPECTED)
def test_two_answers(family: str) -> None:
    assert [text for _, text in tokens(family, TWO)] == EXPECTED[family]
    assert [learned for learned, _ in tokens(family, TWO)] == [bool(n % 2) for n in range(len(EXPECTED[family]))]


@pytest.mark.parametrize("family", EXPECTED)
def test_only_the_last_answer(family: str) -> None:
    before, *rest = ["".join(EXPECTED[family][:3]), *EXPECTED[family][3:]]
    assert [text for _, text in tokens(family, TWO, last_only=True)] == [before, *rest]


@pytest.mark.parametrize("family", [*EXPECTED, "qwen3"])
def test_before_the_answer_stands_what_rl_samples_from(family: str) -> None:
    tokenizer = tokenizer_of(family)
    ids, learned = conversation_tokens(Template(tokenizer=tokenizer, variables={}), TWO[:2], last_only=False)
    _, prompt = apply_template(tokenizer, TWO[:1], {})
    assert ids[: int(learned.argmax())].tolist() == prompt


@pytest.mark.parametrize(
    ("family", "read"),
    [("chatml", "<|im_start|>system\nBe brief.<|im_end|>\n"), ("llama2", "<s>[INST] <<SYS>>\nBe brief.")],
)
def test_the_system_message_is_read(family: str, read: str) -> None:
    found = tokens(family, turns("Hi", "Hello!", system="Be brief."))
    assert found[0][1].startswith(read)
    assert [learned for learned, _ in found][:2] == [False, True]
    assert "Hello!" in found[1][1]


def test_reasoning_before_the_answer_is_learned() -> None:
    found = tokens("qwen3", turns("2+2?", "<think>\neasy\n</think>\n\n4"))
    assert found[1] == (True, "<think>\neasy\n</think>\n\n4<|im_end|>")


def test_what_the_generation_prompt_holds_already_is_not_learned() -> None:
    off = {"enable_thinking": False}
    read, learned, _ = tokens("qwen3", turns("2+2?", "4"), variables=off)
    assert read == (False, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert learned == (True, "4<|im_end|>")


def test_a_template_that_changes_earlier_turns_is_refused_unless_only_the_last_is_learned() -> None:
    with pytest.raises(DataError, match=r"writes the text up to message 1 differently .*data.train_on=last_turn"):
        tokens("qwen3", TWO)
    found = tokens("qwen3", TWO, last_only=True)
    assert [part for part in found if part[0]] == [(True, "<think>\n\n</think>\n\n4<|im_end|>")]
    assert "assistant\nHello!" in found[0][1]


def test_a_template_that_drops_what_it_asks_for_is_refused() -> None:
    with pytest.raises(DataError, match=r"message 1 differently .*use a template with {% generation %} markers"):
        tokens("deepseek_r1", turns("2+2?", "<think>\neasy</think>4"))


def test_tool_calls_are_learned_and_what_tools_answer_is_read() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    found = tokens("qwen2_5", messages, tools=[{"name": "add"}])
    assert found[0][1].startswith(
        '<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n<tools>\n{"name": "add"}'
    )
    assert [text for learned, text in found if learned] == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>',
        "It is 4.<|im_end|>",
    ]
    assert "<tool_response>\n4\n</tool_response>" in found[2][1]


def test_a_conversation_that_begins_with_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match=r"begins with an answer that no message asks for"):
        tokens("chatml", [{"role": "assistant", "content": "Hello!"}])


def test_what_the_template_refuses_is_told() -> None:
    with pytest.raises(DataError, match=r"the chat template refuses it: .*no system role"):
        tokens("gemma", turns("Hi", "Hello!", system="Be brief."))


def test_a_token_over_the_border_is_split() -> None:
    """This tokenizer makes one token of "ab": whole it would be half read and half learned."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "<e>": 4}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    plain.pre_tokenizer = pre_tokenizers.Split("|", "isolated")
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<e>")
    ids, learned = tokens_of_spans(tokenizer, "cabc", [(2, 4)])  # ca|bc
    assert ids.tolist() == [2, 0, 1, 2]  # c a | b c
    assert learned.tolist() == [False, False, True, True]
    ids, learned = tokens_of_spans(tokenizer, "cabc", [(3, 4)])  # cab|c: the border lies between tokens
    assert ids.tolist() == [2, 3, 2]
    assert learned.tolist() == [False, False, True]


def test_spans_are_places_in_the_whole_text() -> None:
    template = Template(tokenizer=tokenizer_of("mistral"), variables={})
    text, spans = answer_spans(template, TWO)
    assert text == "<s>[INST] Hi [/INST]Hello!</s>[INST] 2+2? [/INST]4</s>"
    assert [text[start:end] for start, end in spans] == ["Hello!</s>", "4</s>"]
