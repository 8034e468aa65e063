"""Bases of reward managers written for verl, their registry, and the two of verl's own that people subclass."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posttrain.libraries.verl.protocol import DataProto, DataProtoItem
from posttrain.rewards.verl.scores import default_compute_score

_registered: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Register a class under the name that ``reward_model.reward_manager`` takes."""

    def keep(made: type) -> type:
        _registered[name] = made
        return made

    return keep


def get_reward_manager_cls(name: str) -> type:
    """Return the class that is registered under a name. Raises: ValueError without one."""
    if name not in _registered:
        raise ValueError(
            f"no reward manager is registered as {name!r} (registered: {', '.join(_registered) or 'none'})"
        )
    return _registered[name]


class AbstractRewardManager(ABC):
    """Called with a batch; returns its scores on tokens [B, T], or these under "reward_tensor" beside "reward_extra_info"."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any, reward_fn_key: str = "data_source", **kwargs: Any
    ):
        """Take the tokenizer and the function that scores one response."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Score a batch."""

    def _extract_reward_from_rm_scores(self, data: DataProto, return_dict: bool = False) -> Any:
        """Return the scores of a reward model, which verl's own managers of 0.7 return as they are; None without them."""
        scores = data.batch.get("rm_scores")
        return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict and scores is not None else scores


class _RunningLoop:
    """The event loop that runs the call; one that the constructor keeps is dropped, as each call has a new one."""

    def __get__(self, manager: Any, owner: type) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def __set__(self, manager: Any, loop: Any) -> None:
        pass


class RewardManagerBase(ABC):
    """Called with one row at a time; ``run_single`` is a coroutine that returns {"reward_score", "reward_extra_info"}."""

    loop = _RunningLoop()

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any = None):
        self.config, self.tokenizer = config, tokenizer
        self.compute_score = compute_score or default_compute_score

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score a batch of one row."""


class NaiveRewardManager(AbstractRewardManager):
    """Calls ``compute_score`` with every response, decoded without special tokens."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        **_: Any,
    ):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score: Callable[..., Any] = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        extra: dict[str, list[Any]] = defaultdict(list)
        for number, item in enumerate(data):
            ids = valid_response(item)
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=self.tokenizer.decode(ids, skip_special_tokens=True),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info") or {},
            )
            if isinstance(score, dict):
                for name, value in score.items():
                    extra[name].append(value)
            rewards[number, len(ids) - 1] = float(score["score"] if isinstance(score, dict) else score)
        return {"reward_tensor": rewards, "reward_extra_info": dict(extra)} if return_dict else rewards


class BatchRewardManager(NaiveRewardManager):
    """Calls ``compute_score`` once, with lists."""

    def verify(self, data: DataProto) -> list[Any]:
        """Return a score per row."""
        objects = data.non_tensor_batch
        texts = [self.tokenizer.decode(valid_response(item), skip_special_tokens=True) for item in data]
        compute_scores: Callable[..., list[Any]] = self.compute_score
        return compute_scores(
            data_sources=list(objects[self.reward_fn_key]),
            solution_strs=texts,
            ground_truths=[each["ground_truth"] for each in objects["reward_model"]],
            extra_infos=list(objects["extra_info"]),
        )

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        extra: dict[str, list[Any]] = defaultdict(list)
        for number, (item, score) in enumerate(zip(data, self.verify(data), strict=True)):
            if isinstance(score, dict):
                for name, value in score.items():
                    extra[name].append(value)
            rewards[number, len(valid_response(item)) - 1] = float(score["score"] if isinstance(score, dict) else score)
        return {"reward_tensor": rewards, "reward_extra_info": dict(extra)} if return_dict else rewards


def valid_response(item: DataProtoItem) -> Tensor:
    """Return a row's response tokens without padding."""
    prompt_tokens = item.batch["prompts"].shape[-1]
    count = int(item.batch["attention_mask"][prompt_tokens:].sum())
    return item.batch["responses"][:count]
