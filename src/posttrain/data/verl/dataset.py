"""The dataset of verl that users subclass: files become ``self.dataframe``, and its rows become prompts of token ids."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from posttrain.data.record_files import read_records
from posttrain.data.verl.table import Table
from posttrain.libraries.verl.tensors import compute_position_id_with_mask, postprocess_data


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack the tensors of rows, and put everything else into arrays of objects."""
    found: dict[str, list[Any]] = {}
    for row in data_list:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {
        name: torch.stack(values)
        if all(isinstance(value, torch.Tensor) for value in values)
        else np.fromiter(values, dtype=object, count=len(values))
        for name, values in found.items()
    }


class RLHFDataset(Dataset[dict[str, Any]]):
    """Prompts of parquet, JSON or CSV files, with the attributes and methods that subclasses read and override.

    Raises: KeyError in ``__getitem__`` for a row without the prompt's column; NotImplementedError or RuntimeError for a prompt
        longer than ``max_prompt_length`` with ``truncation: error``.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        files = [data_files] if isinstance(data_files, str | os.PathLike) else [str(file) for file in data_files]
        self.data_files, self.original_data_files = files, copy.copy(files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.cache_dir = os.path.expanduser(config.get("cache_dir", "~/.cache/verl/rlhf"))
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key, self.video_key = config.get("image_key", "images"), config.get("video_key", "videos")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.return_raw_chat = config.get("return_raw_chat", False)
        self.return_full_prompt = config.get("return_full_prompt", False)
        self.truncation = config.get("truncation", "error")
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", True)
        self.apply_chat_template_kwargs = dict(config.get("apply_chat_template_kwargs", None) or {})
        self.num_workers = config.get("filter_overlong_prompts_workers", 1)
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self.filter_prompts = config.get("filter_prompts", True)
        self.shuffle, self.seed = config.get("shuffle", False), config.get("seed", None)
        self.use_shm, self.serialize_dataset = False, False
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """No-op: files are local when this class reads them."""

    def _read_files_and_tokenize(self) -> None:
        rows = [row for file in self.data_files for row in read_records(os.path.expanduser(file))]
        self.dataframe = Table(rows)
        if 0 < self.max_samples < len(self.dataframe):
            order = np.arange(len(self.dataframe))
            if self.shuffle:
                order = np.random.default_rng(self.seed).permutation(order)
            self.dataframe = self.dataframe.select(order[: self.max_samples].tolist())
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Leave out prompts of more than ``max_prompt_length`` tokens, where ``filter_overlong_prompts`` is true."""
        if not self.filter_overlong_prompts:
            return dataframe
        longest = self.max_prompt_length
        return dataframe.filter(lambda row: len(self._ids(self._rendered(self._build_messages(row)))) <= longest)

    def resume_dataset_state(self) -> None:
        """Read the files again."""
        self.data_files = copy.copy(self.original_data_files)
        self._read_files_and_tokenize()

    def __len__(self) -> int:
        return len(self.dataframe)

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the messages out of a row."""
        messages: list[dict[str, Any]] = example.pop(self.prompt_key)
        return messages

    def _rendered(self, messages: Any) -> str:
        settings = self.apply_chat_template_kwargs
        text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **settings)
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def __getitem__(self, item: int) -> dict[str, Any]:
        row: dict[str, Any] = self.dataframe[item]
        messages = self._build_messages(row)
        text = self._rendered(messages)
        ids = torch.tensor([self._ids(text)])
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        ids, mask = postprocess_data(ids, torch.ones_like(ids), self.max_prompt_length, pad, True, self.truncation)
        row |= {"input_ids": ids[0], "attention_mask": mask[0], "position_ids": compute_position_id_with_mask(mask)[0]}
        row["raw_prompt_ids"] = ids[0][mask[0].bool()].tolist()
        if self.return_raw_chat:
            row["raw_prompt"] = messages
        if self.return_full_prompt:
            row["full_prompts"] = text
        row["extra_info"] = row.get("extra_info") or {}
        row["index"] = row["extra_info"].get("index", 0)
        for name in ("tools_kwargs", "interaction_kwargs"):
            row[name] = row["extra_info"].get(name) or {}
        return row
