"""Sampling with transformers' own ``generate``: slow, and the reference for the other engines.

It reads the trainer's module in memory, with transformers' attention in place of ours while it samples, and left-pads
prompts. Temperature and cuts are transformers' own; the draw is ours, so that every response has its own random numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from posttrain.backends.rollout.hf.stream import LockStepStream
from posttrain.errors import ConfigError, Problem, RunStopped
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens, Request
from posttrain.models.loading import end_token_ids
from posttrain.models.vision import image_features, reads_images
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.registry import ROLLOUT_ENGINES

ATTENTION = "sdpa"  # transformers' own, which supports padding


@dataclass(slots=True, eq=False)
class _ResponseRow:
    """One response in progress."""

    request: Request
    random: np.ndarray  # [max_response_tokens] in [0, 1)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None


@ROLLOUT_ENGINES.register("hf", shares_weights=True, reads_images=True, reads_options=False)
class HuggingFaceEngine:
    """See interfaces.rollout_engine.RolloutEngine. Responses are sampled in batches of ``max_concurrent_sequences`` rows; a batch
    lasts until its longest response ends."""

    note = ""  # nothing unusual

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent_sequences: int,
        max_prefill_tokens: int,  # a setting of the native engine, ignored here
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.end_tokens = end_token_ids(model, tokenizer)
        self.max_concurrent_sequences = max_concurrent_sequences
        self._version = 0
        self._stream: LockStepStream | None = None

    @property
    def version(self) -> int:
        return self._version

    def weights_changed(self, version: int) -> None:
        if self._stream is not None:
            self._stream.refuse_new_weights()
        self._version = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """See interfaces.rollout_engine. Raises: RunStopped when the model's logits are not finite; ConfigError for unknown
        engine_sampling parameters."""
        self._refuse_beside_a_stream()
        samples, longest = sampling.samples_per_prompt, sampling.max_response_tokens
        requests = deque(Request.of(prompt, number, longest) for prompt in prompts for number in range(samples))
        done: list[Trajectory] = []
        groups: list[TrajectoryGroup] = []
        while requests:
            done += self.sample(requests, sampling, on_tokens)
            for index in range(len(groups), len(done) // samples):
                of_group = tuple(done[index * samples : (index + 1) * samples])
                groups.append(TrajectoryGroup(prompt=prompts[index], trajectories=of_group))
                if on_group:
                    on_group(groups[-1])
        return groups

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> LockStepStream:
        """See interfaces.rollout_engine. Each wait samples one batch of the submitted requests."""
        self._refuse_beside_a_stream()
        self._stream = LockStepStream(partial(self.sample, sampling=sampling, on_tokens=on_tokens))
        return self._stream

    def _refuse_beside_a_stream(self) -> None:
        if self._stream is not None and not self._stream.closed:
            raise RuntimeError("a stream of this sampler is open: close it first")

    @torch.inference_mode()
    def sample(
        self, requests: deque[Request], sampling: SamplingParams, on_tokens: OnTokens | None
    ) -> list[Trajectory]:
        """Sample a batch of the first requests to the end, and remove them from the queue."""
        if sampling.prompt_logprobs:
            raise RunStopped("rollout.engine=hf gives no log-probs of prompts: use native or vllm")
        rows: list[_ResponseRow] = []
        while requests and len(rows) < self.max_concurrent_sequences:
            request = requests.popleft()
            generator = np.random.Generator(np.random.Philox(key=sampling.request_seed(request.sample_id)))
            rows.append(_ResponseRow(request, generator.random(request.max_response_tokens)))
        with _own_attention(self.model):
            self._batch(rows, sampling, on_tokens)
        return [self._trajectory(row) for row in rows]

    def _batch(self, rows: list[_ResponseRow], sampling: SamplingParams, on_tokens: OnTokens | None) -> None:
        """Sample one response per row."""
        width = max(len(row.request.token_ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            length = len(row.request.token_ids)
            ids[place, width - length :] = torch.tensor(row.request.token_ids)
            mask[place, width - length :] = 1
        draw = _DrawProcessor(self, rows, sampling, on_tokens)
        try:
            model: Any = self.model  # its generate is annotated through a mixin
            model.generate(
                inputs=ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=self._generation_config(sampling, max(len(row.random) for row in rows)),
                logits_processor=_warpers(sampling, draw),
                stopping_criteria=StoppingCriteriaList([_AllDone(rows)]),
                **_image_inputs(self.model, rows, ids),
            )
        except (TypeError, ValueError) as error:
            if not sampling.engine_sampling:
                raise
            what = f"generate does not take engine_sampling {dict(sampling.engine_sampling)}: {error}"
            raise ConfigError(Problem(what, field="rollout.engine_sampling")) from error

    def _generation_config(self, sampling: SamplingParams, longest: int) -> GenerationConfig:
        """Return the model's own generation config (repetition penalty, forbidden tokens), with the run's settings."""
        config = GenerationConfig.from_dict(self.model.generation_config.to_dict())
        decided: dict[str, Any] = {
            "do_sample": False,  # the last processor leaves one token: see _DrawProcessor
            "temperature": None,
            "top_k": None,
            "top_p": None,
            "min_p": None,
            "num_beams": 1,
            "max_new_tokens": longest,
            "max_length": None,
            "eos_token_id": self._ends(sampling),
            "pad_token_id": 0,
            "use_cache": True,
            "return_dict_in_generate": False,
        }
        requested = dict(sampling.engine_sampling)
        if "min_tokens" in requested:  # vLLM's name, which the dialects use
            requested["min_new_tokens"] = requested.pop("min_tokens")
        for name, value in (decided | requested).items():
            if not hasattr(config, name):
                raise ValueError(f"{name} is unknown")
            setattr(config, name, value)
        return config

    def _ends(self, sampling: SamplingParams) -> list[int]:
        """Return the end tokens for generate. An unused id stands for none: an empty list would mean the model's own."""
        ends = () if sampling.ignore_eos else self.end_tokens
        return sorted(ends) or [self.model.config.get_text_config().vocab_size]

    def take(self, row: _ResponseRow, token: int, logprob: float, sampling: SamplingParams) -> None:
        """Append a drawn token to a response and check if the response ends."""
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        if token in sampling.stop_token_ids or (token in self.end_tokens and not sampling.ignore_eos):
            row.stop_reason = StopReason.EOS
        elif self._ends_with_stop_text(row, sampling):
            row.stop_reason = StopReason.STOP_TEXT
        elif len(row.token_ids) >= row.request.max_response_tokens:
            row.stop_reason = StopReason.LENGTH

    def _ends_with_stop_text(self, row: _ResponseRow, sampling: SamplingParams) -> bool:
        if not sampling.stop:
            return False
        # At most b tokens spell a text of b bytes; a few more cover a character cut in two.
        tail = max(len(text.encode()) for text in sampling.stop) + 8
        recent = str(self.tokenizer.decode(row.token_ids[-tail:], skip_special_tokens=False))
        return any(text in recent for text in sampling.stop)

    def _trajectory(self, row: _ResponseRow) -> Trajectory:
        assert row.stop_reason is not None
        return Trajectory(
            sample_id=row.request.sample_id,
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            text=str(self.tokenizer.decode(row.token_ids, skip_special_tokens=True)),
            stop_reason=row.stop_reason,
            policy_version=self._version,
        )


class _DrawProcessor(LogitsProcessor):
    """The last processor: draws a token per row with its own random number and makes it the only possible one, which
    ``generate`` then takes. So a log-prob is stored for one token per step, instead of all logits of all steps."""

    def __init__(
        self, engine: HuggingFaceEngine, rows: list[_ResponseRow], sampling: SamplingParams, on_tokens: OnTokens | None
    ):
        self._engine = engine
        self._rows = rows
        self._sampling = sampling
        self._on_tokens = on_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = scores.float().log_softmax(dim=1)
        if self._sampling.temperature == 0:
            tokens = logprobs.argmax(dim=1)
        else:
            random = [row.random[min(len(row.token_ids), len(row.random) - 1)] for row in self._rows]
            cumulative = logprobs.double().exp().cumsum(dim=1)
            points = torch.tensor(random, dtype=torch.float64, device=scores.device)[:, None] * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, points, right=True).squeeze(1).clamp(max=scores.shape[1] - 1)
        drawn = logprobs.gather(1, tokens[:, None]).squeeze(1)
        if not torch.isfinite(drawn).all():
            raise RunStopped(
                f"the model's logits are not finite while sampling, with weights of version {self._engine.version}: the "
                "weights have diverged or hold NaN; resume from an earlier checkpoint with a lower learning rate"
            )
        live = [place for place, row in enumerate(self._rows) if row.stop_reason is None]
        ids, values = tokens.tolist(), drawn.tolist()
        for place in live:
            self._engine.take(self._rows[place], ids[place], values[place], self._sampling)
        if self._on_tokens:
            self._on_tokens(len(live))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _AllDone(StoppingCriteria):
    def __init__(self, rows: list[_ResponseRow]):
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        done = [row.stop_reason is not None for row in self._rows]
        return torch.tensor(done, device=input_ids.device)


def _image_inputs(model: PreTrainedModel, rows: Sequence[_ResponseRow], ids: Tensor) -> dict[str, Any]:
    """Return the image inputs of ``generate``: the features of all images, in the order of the rows, computed once per distinct
    prompt; and the places of their tokens in ids, [rows, width], which give models with three-part positions theirs."""
    of_rows = [row.request.images for row in rows if row.request.images]
    if not of_rows:
        return {}
    features = image_features(model, of_rows)
    width = model.config.get_text_config().hidden_size
    # Of each prompt: the embeddings, and what is added after each of the first layers
    shown, *added = zip(*(features[images.content_hash].split(width, dim=1) for images in of_rows), strict=True)
    output: Any = BaseModelOutputWithPooling(pooler_output=cast(Any, shown))
    if added:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        output = BaseModelOutputWithDeepstackFeatures(
            pooler_output=cast(Any, shown), deepstack_features=cast(Any, added)
        )
    inputs: dict[str, Any] = {"mm_encoder_outputs": {"image": output}}
    if "image_grid_thw" in of_rows[0].features:
        grids = np.concatenate([images.features["image_grid_thw"] for images in of_rows])
        inputs["image_grid_thw"] = torch.tensor(grids, device=model.device)
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int().to(model.device)
    return inputs


def _warpers(sampling: SamplingParams, draw: _DrawProcessor) -> LogitsProcessorList:
    """Return the processors of all tokens, the draw last."""
    warpers = _cuts(sampling)
    if sampling.has_own_first:
        warpers = [_FirstApart(_cuts(sampling.of_first_token()), warpers)]
    return LogitsProcessorList([*warpers, draw])


class _FirstApart(LogitsProcessor):
    """Processors of the first token that ``generate`` draws, and of the others."""

    def __init__(self, first: Sequence[LogitsProcessor], others: Sequence[LogitsProcessor]):
        self._first, self._others = LogitsProcessorList(first), LogitsProcessorList(others)
        self._begun = False

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        chosen = self._others if self._begun else self._first
        self._begun = True
        return chosen(input_ids, scores)


def _cuts(sampling: SamplingParams) -> list[LogitsProcessor]:
    """Return the processors for temperature, then top-k, top-p and min-p, as in every engine; none of them at temperature 0."""
    warpers: list[LogitsProcessor] = []
    if sampling.temperature > 0:
        if sampling.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k > 0:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' attention in the model inside the ``with`` block."""
    before: Any = model.config._attn_implementation
    if reads_images(model.config):  # ours is only in its language model
        before = {"text_config": model.config.get_text_config()._attn_implementation}
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
