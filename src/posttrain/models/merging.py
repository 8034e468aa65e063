"""The base model of a saved adapter, with the adapter merged into it, as a plain Hugging Face folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import ModelError, Problem
from posttrain.models.loading import auto_class, expanded, first_line, load_model_config
from posttrain.models.lora import CONFIG, peft_library, read_config
from posttrain.models.quantized import round_like
from posttrain.models.saving import save_model
from posttrain.models.vision import copy_processor


def merge_saved_adapter(folder: Path, out: Path) -> None:
    """Write the base model of a saved adapter with the adapter merged, in float32, as a plain Hugging Face folder.

    The merged model is checked against base and adapter (equal to 1e-4 of the largest logit).

    Raises: ModelError when the base named in adapter_config.json does not exist, or the outputs differ.
    """
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from posttrain.models.value_head import load_value_model, write_pad_token

    disable_progress_bar()
    peft = peft_library("policy.lora")
    config = read_config(peft, str(folder), "")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = expanded(config.base_model_name_or_path)
    try:
        if config.task_type in (peft.TaskType.TOKEN_CLS, peft.TaskType.SEQ_CLS):
            of_sequences = config.task_type == peft.TaskType.SEQ_CLS
            model: Any = load_value_model(base, dtype=torch.float32, of_sequences=of_sequences)
            if of_sequences:
                write_pad_token(model, tokenizer)
            model.set_attn_implementation("sdpa")
        else:
            model = auto_class(load_model_config(base)).from_pretrained(base, dtype=torch.float32)
        round_like(model, folder, head=next(iter(config.modules_to_save or []), None))
        with warnings.catch_warnings():  # peft 0.21 uses a name of transformers that version 6 removes
            warnings.simplefilter("ignore", FutureWarning)
            adapted = peft.PeftModel.from_pretrained(model, folder).eval()
    except (OSError, ValueError, RuntimeError, ModelError) as error:
        what = f"the adapter in {folder} cannot be merged into {base}: {first_line(error)}"
        fix = f"put the base model back, or write its place into base_model_name_or_path of {folder / CONFIG}"
        raise ModelError(Problem(what, fix=fix)) from error
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        got = merged(input_ids=ids).logits
    worst = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    if not worst < 1e-4:
        raise ModelError(Problem(f"merged, {folder} computes other logits than base and adapter, by {worst:.1e}"))
    save_model(merged, out)
    tokenizer.save_pretrained(out)
    copy_processor(str(folder), out)
