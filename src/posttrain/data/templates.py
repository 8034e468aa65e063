"""Rendering of chat messages to token ids: the chat template, applied once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from posttrain.data.images import PromptImageReader
from posttrain.data.templated import texts_of
from posttrain.errors import DataError, ModelError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Options set by this module, which data.chat_template_options must not set.
_OURS = ("conversation", "tokenize", "add_generation_prompt", "chat_template", "return_dict", "tools")


TEMPLATE = "chat_template"  # among the options of a data source: the text of a template in place of the tokenizer's


def check_template(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], *, replaced: bool = False
) -> list[Problem]:
    """Return the problems of any template use: a tokenizer without a template, and options that the user must not set.

    Args: ``replaced``: another template takes the place of the tokenizer's.
    """
    problems = []
    if not tokenizer.chat_template and not replaced:
        name = getattr(tokenizer, "name_or_path", "")
        problems.append(
            Problem(
                f"the tokenizer{f' of {name}' if name else ''} has no chat template",
                fix="name a Jinja file with model.chat_template_file, or use a model tuned for chat",
                field="model.chat_template_file",
            )
        )
    for name in sorted(set(options) & set(_OURS)):
        problems.append(
            Problem(f"{name} is set by posttrain", fix="remove it", field=f"data.chat_template_options.{name}")
        )
    return problems


def _home_of(tokenizer: Any) -> str:
    """The folder that a tokenizer and its own template come from, for a message; "" where it is not known."""
    folder = getattr(tokenizer, "name_or_path", "")
    return f" (the tokenizer's own is in {folder})" if folder else ""


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    processor: PromptImageReader | None = None,
    sizes: Sequence[tuple[int, int]] = (),
) -> tuple[str, list[int]]:
    """Render a prompt as text and as token ids, up to the assistant's turn. In the text an image is one placeholder.

    Args: ``processor`` belongs to a vision model, for images of ``sizes`` (width, height) in the order of the image parts.
    Raises: as ``render``, and DataError when the template's places for images do not match ``sizes``.
    """
    if processor is None:
        text = render(tokenizer, messages, options)
        return text, ids_of(tokenizer, text)
    text = render(tokenizer, [{**message, "content": _parts(message["content"])} for message in messages], options)
    return text, ids_of(tokenizer, processor.expand(text, sizes))


def tokenise_raw(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    processor: PromptImageReader | None = None,
    sizes: Sequence[tuple[int, int]] = (),
) -> tuple[str, list[int]]:
    """Tokenise the text of a prompt's only message as it is. Markers in it become the tokenizer's special tokens, and none is
    added, as with the output of a template.

    Raises: DataError for several messages, or a message that is not one text.
    """
    texts = list(texts_of(messages))
    if len(messages) != 1 or len(texts) != 1:
        many = f"{len(messages)} messages" if len(messages) != 1 else f"a message of {len(texts)} texts"
        what = f"data.templated_prompts=raw tokenizes one text, and this prompt has {many}"
        raise DataError(Problem(what))
    return texts[0], ids_of(tokenizer, processor.expand(texts[0], sizes) if processor else texts[0])


def _parts(content: Any) -> Any:
    """Convert content to typed parts, the only form that the templates of some vision models accept."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise template output without special tokens: the template has written its own begin-of-sequence token, and the
    tokenizer would add a second one."""
    # verbose=False omits a warning about the model's longest input; lengths are checked by their own limits
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _with_arguments_as_texts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose calls have their arguments as JSON texts."""

    def as_text(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Render a conversation, with the tools offered in it, by the chat template.

    Raises: ModelError as ``check_template`` finds, or when the template is invalid; DataError when it rejects these
        messages.
    """
    own = {name: value for name, value in options.items() if name != TEMPLATE}
    if problems := check_template(tokenizer, own, replaced=options.get(TEMPLATE) is not None):
        raise ModelError(problems)

    def rendered(given: Sequence[Mapping[str, Any]]) -> Any:
        return tokenizer.apply_chat_template(
            [dict(message) for message in given],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=[dict(tool) for tool in tools] or None,
            **options,
        )

    try:
        try:
            text = rendered(messages)
        except TypeError:
            # Templates of DeepSeek's models join the arguments of calls to a text, and fail where they are objects.
            if (as_texts := _with_arguments_as_texts(messages)) == list(messages):
                raise
            text = rendered(as_texts)
    except TemplateSyntaxError as error:
        raise ModelError(
            Problem(
                f"the chat template cannot be read: {error.message}, in its line {error.lineno}",
                fix=f"mend it{_home_of(tokenizer)}, or name another Jinja file with model.chat_template_file",
                field="model.chat_template_file",
            )
        ) from error
    except Exception as error:  # a template is a program from the model's folder and may fail in any way
        raise DataError(Problem(f"the chat template refuses it: {type(error).__name__}: {error}")) from error
    assert isinstance(text, str)  # one conversation gives one text
    return text
