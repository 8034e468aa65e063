"""Engines that compute nothing, so that what is left of a step is the driver's: a sampler with made tokens, and a policy whose
gradient is 0, on one device or shared by the ranks of a Ray run. A plug-in: ``model.external_modules: [null_engines]``, with
this folder on the path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from null_samples import LOGPROB, REFERENCE_LOGPROB, VALUE, NullSamples, NullStream
from torch import Tensor

from posttrain.backends.torch_training.critic import ValueModel
from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.backends.torch_training.ranks import RanksSharding
from posttrain.backends.torch_training.scoring import LogprobScorer, over_rows
from posttrain.config import TrainingConfig
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.plan.engine import EnginePlan
from posttrain.records.batches import LossCounts, SequenceBatch, TrainBatch
from posttrain.records.plans import LossPlan, PreferencePlan, ValueLossPlan
from posttrain.records.prompts import Prompt
from posttrain.records.span_tensors import row_counts
from posttrain.records.statistics import ForwardBackwardStats, ValueStats
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup
from posttrain.registry import ENGINE_PLANS, ROLLOUT_ENGINES, TRAIN_ENGINES, VALUE_ENGINES


@ROLLOUT_ENGINES.register("null", shares_weights=True, reads_options=False, resumes_responses=True)
class NullSampler:
    """Responses of 1 to max_response_tokens tokens, uniform, the same whenever they are asked for."""

    note = ""

    def __init__(self, model: Any, tokenizer: Any, **settings: Any):
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def weights_changed(self, version: int) -> None:
        self._version = version

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> NullStream:
        return NullStream(self._version, on_tokens)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        samples, draw = NullSamples(sampling, self._version), random.Random(sampling.seed)
        groups = []
        for prompt in prompts:
            trajectories = samples.of(prompt, draw)
            groups.append(TrajectoryGroup(prompt=prompt, trajectories=trajectories))
            if on_tokens:
                on_tokens(sum(len(each.token_ids) for each in trajectories))
            if on_group:
                on_group(groups[-1])
        return groups


@ENGINE_PLANS.register("null")
class NullPlan(EnginePlan):
    """Every rank takes a share of the rows, as one does that has a part of the model."""

    shares_out = True


class NullSharding(RanksSharding):
    """Ranks that share out rows, and no weights."""

    @classmethod
    def of_options(cls, options: Any, role: str, *, device_type: str, compute_dtype: torch.dtype, sequence: int) -> Any:
        return cls(device_type, compute_dtype=compute_dtype, sequence=sequence)


class NullReference(LogprobScorer):
    """A reference whose log-probs are made, and are not the policy's."""

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        def of(rows: list[int]) -> Tensor:
            return batch.rows(rows).response_mask[: len(rows)] * REFERENCE_LOGPROB

        return over_rows(batch, self.cutter, self.sharding, of)


@TRAIN_ENGINES.register("null")
class NullPolicy(PolicyModel):
    """A policy of the model's weights, with log-probs that are made, and a gradient of 0."""

    @staticmethod
    def scorer(
        model: Any, rows: int, share_prompts: bool = True, tokens: int | None = None, **how: Any
    ) -> LogprobScorer:
        return NullReference(model, rows, share_prompts, max_tokens_per_micro_batch=tokens, **how)

    @staticmethod
    def sharding_of(
        config: TrainingConfig, role: str, device: torch.device, compute_dtype: torch.dtype
    ) -> NullSharding | None:
        if not torch.distributed.is_initialized():
            return None
        return NullSharding.of_run(config, role, device.type, compute_dtype)

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return over_rows(
            batch, self.cutter, self._sharding, lambda rows: batch.rows(rows).response_mask[: len(rows)] * LOGPROB
        )

    def entropies(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return batch.response_mask * 1.0

    def forward_backward(
        self, batch: TrainBatch, loss: LossPlan | PreferencePlan, counts: LossCounts
    ) -> ForwardBackwardStats:
        for weight in self._masters.parameters.values():
            weight.grad = torch.zeros_like(weight)

        def of(rows: list[int]) -> Tensor:
            return batch.rows(rows).sequences.response_mask[: len(rows)] * LOGPROB

        logprobs = over_rows(batch.sequences, self.cutter, self._sharding, of)
        return ForwardBackwardStats(loss=0.0, sums={}, tokens=int(batch.loss_mask.sum()), policy_logprobs=logprobs)


@VALUE_ENGINES.register("null")
class NullCritic(ValueModel):
    """A critic of the model's weights, with values that are made, and a gradient of 0. Its updates read returns."""

    sharding_of = NullPolicy.sharding_of

    def values(self, batch: SequenceBatch) -> Tensor:
        return over_rows(
            batch, self.cutter, self._sharding, lambda rows: batch.rows(rows).response_mask[: len(rows)] * VALUE
        )

    def forward_backward(
        self, batch: TrainBatch, loss: ValueLossPlan | PreferencePlan, counts: LossCounts
    ) -> ValueStats:
        for weight in self._masters.parameters.values():
            weight.grad = torch.zeros_like(weight)

        def of(rows: list[int]) -> Tensor:
            critic = batch.rows(rows).critic
            assert critic is not None
            return critic.returns[: len(rows)] * 1.0

        found = over_rows(batch.sequences, self.cutter, self._sharding, of)
        return ValueStats(loss=0.0, sums={}, tokens=int(row_counts(batch.loss_mask).sum()), values=found)
