"""Continuous batching over the trainer's own weights: no second copy of the model and nothing to send to it.

Requests wait in a queue; a free slot takes the next one, a finished sequence leaves its slot at once. Prompts are
prefilled packed, without padding; samples of one prompt that start together share one prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.rollout.native.sampling import draw, uniforms
from posttrain.backends.rollout.native.slots import SlotCache
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.models.attention import CachedRows
from posttrain.models.loading import end_token_ids
from posttrain.models.packed_attention import packed_layout
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.registry import ROLLOUT_ENGINES


@dataclass(slots=True, eq=False)
class _Request:
    """One response under way."""

    prompt: Prompt
    sample_id: str
    group: int  # number of its prompt
    random: np.ndarray  # [max_response_tokens], one number per draw
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the slot: the prompt, and all drawn tokens but the newest."""
        return len(self.prompt.token_ids) + len(self.token_ids) - 1


@ROLLOUT_ENGINES.register("native")
class NativeEngine:
    """See interfaces.rollout_engine.RolloutEngine."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent_sequences: int,
        max_prefill_tokens: int,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.end_tokens = end_token_ids(model, tokenizer)
        self.max_concurrent_sequences = max_concurrent_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def weights_changed(self, version: int) -> None:
        self._version = version

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """See interfaces.rollout_engine. Raises: RunStopped when the model's logits are not finite."""
        requests = [
            [self._request(prompt, group, number, sampling) for number in range(sampling.samples_per_prompt)]
            for group, prompt in enumerate(prompts)
        ]
        waiting = deque(request for group in requests for request in group)
        slots = min(len(waiting), self.max_concurrent_sequences)
        cache = self._new_cache(slots, max(len(prompt.token_ids) for prompt in prompts) + sampling.max_response_tokens)
        active: list[_Request] = []
        groups: dict[int, TrajectoryGroup] = {}
        while waiting or active:
            free = slots - len(active)
            # A prefill per freed slot would cost a whole pass each: wait until an eighth is free, or everything left fits.
            if waiting and (not active or free >= min(len(waiting), max(1, slots // 8))):
                admitted = self._admit(waiting, free)
                logits = self._prefill(admitted, cache, first_slot=len(active))
                self._draw(admitted, logits, sampling)
                active += admitted
            else:
                logits = self._decode(active, cache)
                self._draw(active, logits, sampling)
            if on_tokens:
                on_tokens(logits.shape[0])
            for number in sorted({request.group for request in active if request.stop_reason is not None}):
                if all(request.stop_reason is not None for request in requests[number]):
                    responses = tuple(self._trajectory(request) for request in requests[number])
                    groups[number] = TrajectoryGroup(prompt=prompts[number], trajectories=responses)
                    if on_group:
                        on_group(groups[number])
            active = self._retire(active, cache)
        return [groups[number] for number in range(len(prompts))]

    def _request(self, prompt: Prompt, group: int, number: int, sampling: SamplingParams) -> _Request:
        sample_id = f"{prompt.prompt_id}/{number}"
        return _Request(prompt, sample_id, group, uniforms(sampling.seed, sample_id, sampling.max_response_tokens))

    def _new_cache(self, slots: int, max_len: int) -> SlotCache:
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        return SlotCache(
            layers=config.num_hidden_layers,
            slots=slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            max_len=max_len,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def _admit(self, waiting: deque[_Request], free: int) -> list[_Request]:
        """The next requests, as many as slots and prefill tokens allow, at least one."""
        admitted: list[_Request] = []
        tokens = 0
        while waiting and len(admitted) < free:
            prompt = waiting[0].prompt
            tokens += len(prompt.token_ids) if not admitted or admitted[-1].prompt is not prompt else 0
            if admitted and tokens > self.max_prefill_tokens:
                break
            admitted.append(waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[_Request], cache: SlotCache, first_slot: int) -> Tensor:
        """Run each distinct prompt once into the slots of its requests. Returns next-token logits, one row per request."""
        token_ids: list[int] = []
        lengths: list[int] = []
        parts: list[tuple[int, int, list[int]]] = []  # start and end of a prompt in the packed row, and its slots
        prompt_of: list[int] = []  # per request, which of the prompts is its own
        slot = first_slot
        for _, same_prompt in groupby(admitted, key=lambda request: id(request.prompt)):
            sharing = len(list(same_prompt))
            prompt = admitted[len(prompt_of)].prompt.token_ids
            parts.append((len(token_ids), len(token_ids) + len(prompt), list(range(slot, slot + sharing))))
            prompt_of += [len(lengths)] * sharing
            token_ids += prompt
            lengths.append(len(prompt))
            slot += sharing
        cache.prefilling(parts)
        output = self.model(
            input_ids=self._tensor(token_ids)[None],
            position_ids=self._tensor([position for length in lengths for position in range(length)])[None],
            past_key_values=cache,
            attention_layout=packed_layout(lengths, self.model.device),
            logits_to_keep=self._tensor([end - 1 for _, end, _ in parts]),
            use_cache=False,
        )
        return output.logits[0][self._tensor(prompt_of)]

    def _decode(self, active: list[_Request], cache: SlotCache) -> Tensor:
        """One token further for every active request. Returns next-token logits [A, vocabulary]."""
        positions = self._tensor([request.cached for request in active])
        visible_len = max(request.cached for request in active) + 1
        cache.decoding(positions, visible_len)
        visible = torch.arange(visible_len, device=self.model.device) <= positions[:, None]
        output = self.model(
            input_ids=self._tensor([request.token_ids[-1] for request in active])[:, None],
            position_ids=positions[:, None],
            past_key_values=cache,
            attention_layout=CachedRows(visible),
            use_cache=False,
        )
        return output.logits[:, -1]

    def _draw(self, requests: list[_Request], logits: Tensor, sampling: SamplingParams) -> None:
        """Draw the next token of each request and note whether it ends there."""
        random = torch.tensor([request.random[len(request.token_ids)] for request in requests], device=logits.device)
        tokens, logprobs = draw(logits, random, sampling)
        if not torch.isfinite(logprobs).all():
            raise RunStopped(
                f"the model's logits are not finite while sampling, with weights of version {self._version}: the weights "
                "have grown without bound or hold NaN; go on from an earlier checkpoint with a lower learning rate"
            )
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.stop_reason = self._stop_reason(request, token, sampling)

    def _stop_reason(self, request: _Request, token: int, sampling: SamplingParams) -> StopReason | None:
        if token in sampling.stop_token_ids or (token in self.end_tokens and not sampling.ignore_eos):
            return StopReason.EOS
        if sampling.stop:
            # A text of b bytes is spelled by at most b tokens; a few more absorb a character cut in two.
            tail = max(len(text.encode()) for text in sampling.stop) + 8
            recent = self.tokenizer.decode(request.token_ids[-tail:], skip_special_tokens=False)
            if any(text in recent for text in sampling.stop):
                return StopReason.STOP_TEXT
        if len(request.token_ids) >= sampling.max_response_tokens:
            return StopReason.LENGTH
        return None

    def _retire(self, active: list[_Request], cache: SlotCache) -> list[_Request]:
        """Close the gaps that finished requests leave: the last active slot moves into each."""
        active = list(active)
        slot = 0
        while slot < len(active):
            if active[slot].stop_reason is None:
                slot += 1
                continue
            last = active.pop()
            if slot < len(active):
                if last.stop_reason is None:
                    cache.move(len(active), slot, last.cached)
                active[slot] = last
        return active

    def _trajectory(self, request: _Request) -> Trajectory:
        assert request.stop_reason is not None
        return Trajectory(
            sample_id=request.sample_id,
            token_ids=tuple(request.token_ids),
            logprobs=tuple(request.logprobs),
            text=str(self.tokenizer.decode(request.token_ids, skip_special_tokens=True)),
            stop_reason=request.stop_reason,
            policy_version=self._version,
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)
