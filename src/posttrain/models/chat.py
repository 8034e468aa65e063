"""A model to talk to: from a folder, the hub, a run, a checkpoint, or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils.logging import disable_progress_bar

from posttrain.config.model import ModelConfig
from posttrain.data.templates import check_template
from posttrain.errors import ModelError, Problem
from posttrain.models.gguf_layout import FAMILIES, Layout, read_weights
from posttrain.models.gguf_settings import check_family, complete_settings, read_settings
from posttrain.models.gguf_tokenizer import read_tokenizer
from posttrain.models.loading import first_line, load_model_config, load_tokenizer

Message = Mapping[str, str]


class Speaker:
    """A model that answers conversations. Raises: ModelError without a chat template."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        if problems := check_template(tokenizer, {}):
            raise ModelError(problems)
        self.name, self._model, self._tokenizer = name, model, tokenizer

    def answer(
        self,
        messages: Sequence[Message],
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> str:
        """Sample an answer (greedily at temperature 0); ``say`` gets its text piece by piece. Equal seeds, equal answers.
        An answer ends where the model's positions do.

        Raises: ModelError when the messages leave no room for one.
        """
        given: Any = self._tokenizer.apply_chat_template(
            [dict(each) for each in messages], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        most = max_tokens
        if positions := getattr(self._model.config.get_text_config(), "max_position_embeddings", None):
            most = min(max_tokens, positions - given["input_ids"].shape[1])
        if most < 1:
            what = f"the conversation has {given['input_ids'].shape[1]} tokens, and {self.name} reads {positions}"
            raise ModelError(Problem(what, fix="begin a new one"))
        drawn = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            generate: Any = self._model.generate
            tokens = generate(
                **given,
                **drawn,
                max_new_tokens=most,
                pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
                streamer=_Streamer(self._tokenizer, say),
            )
        return str(self._tokenizer.decode(tokens[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


class _Streamer(TextStreamer):
    """Hands finished pieces of text on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._say(text)


def load_speaker(path: str, name: str) -> Speaker:
    """Load a model folder, a hub id or a GGUF file, in float32 on the CPU or bfloat16 on a CUDA device. Raises: ModelError."""
    disable_progress_bar()
    on_cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_cuda else ("cpu", torch.float32)
    if path.endswith(".gguf"):
        model, tokenizer = load_gguf(Path(path))
    else:
        load_model_config(path)  # whose errors say what is wrong
        model = AutoModelForCausalLM.from_pretrained(path)
        tokenizer = load_tokenizer(ModelConfig(path=path))
    placed: Any = model
    return Speaker(name, placed.to(device=device, dtype=dtype).eval(), tokenizer)


def load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a GGUF file of a known family as a model of transformers, in float32. Raises: ModelError for another family."""
    disable_progress_bar()
    with TemporaryDirectory(prefix="posttrain-gguf-") as alone:
        # From a folder that holds nothing else: of a tokenizer.json beside it transformers takes a part, without the template.
        link = Path(alone) / file.name
        link.symlink_to(file.resolve())
        try:
            own = read_settings(link)
            config = own or AutoConfig.from_pretrained(alone, gguf_file=link.name)
            if own is None and config.model_type in FAMILIES:
                complete_settings(config, link)
            check_family(config)
            tokenizer = read_tokenizer(link, own=own is not None)
        except (OSError, ValueError, KeyError) as error:
            what = f"{file} cannot be read as the GGUF file of a language model: {first_line(error)}"
            raise ModelError(Problem(what, fix="name a whole file, of a model that llama.cpp talks to")) from error
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = read_weights(file, Layout(config), list(model.state_dict()))
    missing = {name for name in model.load_state_dict(weights, strict=False).missing_keys if name != "lm_head.weight"}
    if missing:
        raise ModelError(f"{file} lacks weights of the model, such as {min(missing)}")
    if "lm_head.weight" not in weights:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model.eval(), tokenizer
