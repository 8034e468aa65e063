"""Continuous batching over the trainer's own weights: nothing is sent to a sampler, because there is none apart.

Requests wait in a queue; a free slot takes the next one, a finished sequence leaves its slot at once. Prompts are prefilled
packed, without padding, each once, and all samples of a prompt read the same keys and values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.sampling import draw, uniforms
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.models.loading import end_token_ids
from posttrain.models.packed_attention import packed_layout
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.registry import ROLLOUT_ENGINES

Item = TypeVar("Item")

ROW_STEP = 8  # rows of a pass are rounded up to it, so that the matrix library meets few shapes
LOGIT_ROWS = 64  # logits of so many rows are looked at together: they stay in a processor's cache


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
        """Tokens whose keys and values are in its slot: all drawn tokens but the newest."""
        return len(self.token_ids) - 1


@dataclass(slots=True, eq=False)
class _CachedPrompt:
    """A prompt in a prompt slot."""

    group: int
    length: int
    logits: Tensor  # [vocabulary], of the first token of a response


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
        self.token_pass = TokenPass(model)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def note(self) -> str:
        """For people: how it computes, where that is not the usual way."""
        return self.token_pass.note

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
        # Stragglers of finished groups keep their prompts' slots: twice as many as full groups need.
        prompt_slots = min(len(prompts), slots, 2 * -(-slots // sampling.samples_per_prompt))
        longest = max(len(prompt.token_ids) for prompt in prompts)
        cache = KeyValueCache.of(
            self.model,
            prompt_slots=prompt_slots,
            slots=slots,
            max_prompt_len=longest,
            max_response_len=sampling.max_response_tokens,
        )
        with self.token_pass.holding_weights():
            groups = self._run(requests, waiting, cache, sampling, on_tokens, on_group)
        return [groups[number] for number in range(len(prompts))]

    def _run(
        self,
        requests: list[list[_Request]],
        waiting: deque[_Request],
        cache: KeyValueCache,
        sampling: SamplingParams,
        on_tokens: OnTokens | None,
        on_group: OnGroup | None,
    ) -> dict[int, TrajectoryGroup]:
        """Every waiting request to its end. Returns the groups by number, in the order in which they were done."""
        active: list[_Request] = []  # in the order of their slots
        held: list[_CachedPrompt] = []  # in the order of their slots
        groups: dict[int, TrajectoryGroup] = {}
        while waiting or active:
            free = cache.slots - len(active)
            # A prefill per freed slot would cost a whole pass each: wait until an eighth is free, or everything left fits.
            admit = waiting and (not active or free >= min(len(waiting), max(1, cache.slots // 8)))
            admitted = self._admit(waiting, free, held, cache.prompt_slots) if admit else []
            if admitted:
                self._prefill(admitted, held, cache)
                first = partial(_first_logits, {one.group: one.logits for one in held})
                self._draw(admitted, first, sampling)
                active += admitted
            else:
                self._decode(active, held, cache, sampling)
            if on_tokens:
                on_tokens(len(admitted or active))
            for number in sorted({request.group for request in active if request.stop_reason is not None}):
                members = requests[number]
                if all(request.stop_reason is not None for request in members):
                    responses = tuple(self._trajectory(request) for request in members)
                    groups[number] = TrajectoryGroup(prompt=members[0].prompt, trajectories=responses)
                    if on_group:
                        on_group(groups[number])
            active = _retire(active, cache)
            held = _release(held, active, waiting, cache)
        return groups

    def _request(self, prompt: Prompt, group: int, number: int, sampling: SamplingParams) -> _Request:
        sample_id = f"{prompt.prompt_id}/{number}"
        return _Request(prompt, sample_id, group, uniforms(sampling.seed, sample_id, sampling.max_response_tokens))

    def _admit(
        self, waiting: deque[_Request], free: int, held: list[_CachedPrompt], prompt_slots: int
    ) -> list[_Request]:
        """The next requests, as many as slots, prompt slots and prefill tokens allow: at least one while none is active."""
        admitted: list[_Request] = []
        known = {one.group for one in held}
        tokens = 0
        while waiting and len(admitted) < free:
            request = waiting[0]
            if request.group not in known:
                tokens += len(request.prompt.token_ids)
                if len(known) == prompt_slots or (admitted and tokens > self.max_prefill_tokens):
                    break
                known.add(request.group)
            admitted.append(waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[_Request], held: list[_CachedPrompt], cache: KeyValueCache) -> None:
        """Run each prompt that is not held yet once, packed, into the next prompt slots."""
        known = {one.group for one in held}
        new = {request.group: request.prompt.token_ids for request in admitted if request.group not in known}
        if not new:
            return
        lengths = [len(ids) for ids in new.values()]
        ends = np.cumsum(lengths).tolist()
        cache.prefilling(
            [(end - length, end, len(held) + row) for row, (length, end) in enumerate(zip(lengths, ends, strict=True))]
        )
        output = self.model(
            input_ids=self._tensor([token for ids in new.values() for token in ids])[None],
            position_ids=self._tensor([position for length in lengths for position in range(length)])[None],
            past_key_values=cache,
            attention_layout=packed_layout(lengths, self.model.device),
            logits_to_keep=self._tensor([end - 1 for end in ends]),
            use_cache=False,
        )
        for group, length, logits in zip(new, lengths, output.logits[0], strict=True):
            held.append(_CachedPrompt(group, length, logits))

    def _decode(
        self, active: list[_Request], held: list[_CachedPrompt], cache: KeyValueCache, sampling: SamplingParams
    ) -> None:
        """One token further for every active request."""
        slot_of = {one.group: slot for slot, one in enumerate(held)}
        # Rows that fill up to a round number stand for the last request's: computed in slots that are free, and not looked at.
        rows = min(-(-len(active) // ROW_STEP) * ROW_STEP, cache.slots)
        slots = active + [active[-1]] * (rows - len(active))
        prompt_slots = [slot_of[request.group] for request in slots]
        prompt_lens = [held[slot].length for slot in prompt_slots]
        response_lens = [request.cached for request in slots]
        cache.decoding(prompt_slots, prompt_lens, response_lens)
        hidden = self.token_pass(
            self._tensor([request.token_ids[-1] for request in slots]),
            self._tensor([prompt + response for prompt, response in zip(prompt_lens, response_lens, strict=True)]),
            cache,
        )
        start = 0

        def logits(requests: list[_Request]) -> Tensor:
            nonlocal start
            start += len(requests)
            return self.token_pass.logits(hidden[start - len(requests) : start])

        self._draw(active, logits, sampling)

    def _draw(
        self, requests: list[_Request], logits: Callable[[list[_Request]], Tensor], sampling: SamplingParams
    ) -> None:
        """Draw the next token of each request and note whether it ends there. ``logits`` is asked for consecutive requests."""
        for first in range(0, len(requests), LOGIT_ROWS):
            some = requests[first : first + LOGIT_ROWS]
            random = torch.tensor([one.random[len(one.token_ids)] for one in some], device=self.model.device)
            tokens, logprobs = draw(logits(some), random, sampling)
            if not torch.isfinite(logprobs).all():
                raise RunStopped(
                    f"the model's logits are not finite while sampling, with weights of version {self._version}: the "
                    "weights have grown without bound or hold NaN; go on from an earlier checkpoint with a lower learning rate"
                )
            for request, token, logprob in zip(some, tokens.tolist(), logprobs.tolist(), strict=True):
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


def _first_logits(of_prompt: dict[int, Tensor], requests: list[_Request]) -> Tensor:
    """Logits of the first token of each response."""
    return torch.stack([of_prompt[request.group] for request in requests])


def _retire(active: list[_Request], cache: KeyValueCache) -> list[_Request]:
    """Close the gaps that finished requests leave."""
    return _close_gaps(
        active,
        gone=lambda request: request.stop_reason is not None,
        move=lambda source, target, request: cache.move(source, target, request.cached),
    )


def _release(
    held: list[_CachedPrompt], active: list[_Request], waiting: deque[_Request], cache: KeyValueCache
) -> list[_CachedPrompt]:
    """Close the gaps that prompts without samples leave. The next to be admitted may belong to a prompt that is held."""
    needed = {request.group for request in active} | ({waiting[0].group} if waiting else set())
    return _close_gaps(
        held,
        gone=lambda one: one.group not in needed,
        move=lambda source, target, one: cache.move_prompt(source, target, one.length),
    )


def _close_gaps(
    items: list[Item], *, gone: Callable[[Item], bool], move: Callable[[int, int, Item], None]
) -> list[Item]:
    """The items that stay, in slots 0, 1, ...: the last one moves into each gap, from slot ``source`` to ``target``."""
    items = list(items)
    slot = 0
    while slot < len(items):
        if not gone(items[slot]):
            slot += 1
            continue
        last = items.pop()
        if slot < len(items):
            if not gone(last):
                move(len(items), slot, last)
            items[slot] = last
    return items
