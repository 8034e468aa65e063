from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from posttrain.config.data import DataConfig

# One token per word; <|im_start|>role … <|im_end|>, as in ChatML, with the blanks left out.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    "{% if polite is defined and polite %} please{% endif %}"
)
WORDS = ["user", "system", "assistant", "please", *(f"w{i}" for i in range(20))]
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<unk>"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """<s> 0, <|im_start|> 1, <|im_end|> 2, <unk> 3, user 4, system 5, assistant 6, please 7, w0 8, w1 9, …

    Like Llama's, it puts <s> in front of any text it is asked to encode with special tokens.
    """
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def data_config() -> Callable[..., DataConfig]:
    """DataConfig of one training file, which no test has to name when it reads files by itself."""

    def make(**fields: Any) -> DataConfig:
        return DataConfig(**{"train_files": ["unused.parquet"], **fields})

    return make


@pytest.fixture
def row() -> Callable[..., dict[str, Any]]:
    """A row in verl's schema."""

    def make(content: str = "w0 w1", truth: str = "72", **changes: Any) -> dict[str, Any]:
        return {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": content}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": 0},
            **changes,
        }

    return make
