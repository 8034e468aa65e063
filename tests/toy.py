"""A toy language of a token per character, in which $ ends a turn, and toy chat templates."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOY = (
    "{% for m in messages %}{{ m['role'][0] | upper }}{{ m['content'] }}$\n{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
# Leaves what stands before a ")" out of all turns but the last.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'][0] | upper }}"
    "{{ m['content'] if loop.last else m['content'].split(')')[-1] }}$\n{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)


def toy_tokenizer(template: str = TOY) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="$", chat_template=template, clean_up_tokenization_spaces=False
    )


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())
