"""Continuous batching: requests wait in a queue, a free slot takes the next one, a finished response frees its slot at once.

Prompts are prefilled packed, without padding, each once, and all responses to a prompt read the same keys and values; responses
that are continued under new weights get copies of them (prefill.py). Those of a conversation are kept until its next turn, which
then prefills only the new tokens.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.rollout.native.prefill import experts_of_prompts, images_of, plan_prefill, shared_tokens
from posttrain.backends.rollout.native.responses import (
    UNSCORED,
    Kept,
    PromptKey,
    PromptState,
    Response,
    begin_response,
    close_gaps,
    common,
    draw_next_tokens,
    first_logits,
    follow_grammar,
    prompt_of,
    stop_reason,
    trajectory_of,
)
from posttrain.backends.rollout.native.sampling import logit_rows, uniforms
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import OnTokens, Request, check_requests
from posttrain.libraries.grammars import Grammars
from posttrain.models.packed_attention import continued_layout
from posttrain.models.recurrent import has_states
from posttrain.models.routing import Routers
from posttrain.models.vision import model_inputs, position_shift
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished

PATIENCE = 4  # passes that a request with a free slot waits to be prefilled together with others


class NativeStream:
    """See interfaces.rollout_engine.RequestStream."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        token_pass: TokenPass,
        sampling: SamplingParams,
        *,
        end_tokens: frozenset[int],
        version: int,
        slots: int,  # responses in progress at a time; as many conversations are kept besides
        prompt_slots: int,  # slots of their prompts
        max_prefill_tokens: int,
        on_tokens: OnTokens | None = None,
        on_close: Callable[[], None] = lambda: None,
        grammars: Callable[[], Grammars],
        routers: Routers | None = None,  # whose choices are recorded
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.token_pass = token_pass
        self.sampling = sampling
        self.end_tokens = end_tokens
        self.version = version
        self.slots = slots
        self.prompt_slots = prompt_slots
        self.max_prefill_tokens = max_prefill_tokens
        self.closed = False
        self.routers, self._grammars = routers, grammars
        self._on_tokens, self._on_close = on_tokens, on_close
        self._prompts: dict[PromptKey, PromptState] = {}  # of the responses that wait or are in progress
        self._waiting: deque[Response] = deque()
        self._names: set[str] = set()  # sample ids of those that wait or are in progress
        self._active: list[Response] = []  # in the order of their slots
        self._held: list[PromptState] = []  # in the order of their slots
        self._kept: dict[str, Kept] = {}  # by conversation, oldest first
        self._cache = token_pass.new_cache(slots)
        # A state is that after all tokens of a prompt or a response: it cannot be used after a part of them.
        self._whole = has_states(model.config)
        self.passes = 0
        self._submitted = 0  # requests
        self._passed_over = 0  # passes in which requests with free slots waited for others
        self._weights = ExitStack()
        self._has_weights = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- the interface

    def submit(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self._names)
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> Response:
        """Submit one request without checks."""
        if self.closed:
            raise RuntimeError("the stream is closed")
        new = prompt_of(request, self.sampling, whole=self._whole)
        prompt = self._prompts.setdefault(new.key, new)
        prompt.users += 1
        seed = self.sampling.seed if request.seed is None else request.seed
        random = uniforms(seed, request.draw_name, request.max_response_tokens)
        response = begin_response(request, prompt, random, number=self._submitted, version=self.version)
        if request.grammar:
            follow_grammar(response, self._grammars().begin(request.grammar))
        self._submitted += 1
        self._waiting.append(response)
        self._names.add(request.sample_id)
        longest = max(request.max_response_tokens, self._cache.longest_response or 0)
        self._cache.longest_response = longest
        return response

    def wait(self, timeout_s: float, passes: int | None = None) -> list[Trajectory]:
        end, last = time.monotonic() + timeout_s, None if passes is None else self.passes + passes
        while self._waiting or self._active:
            ended = self.step()
            if ended or time.monotonic() >= end or self.passes == last:
                return [self.trajectory(response) for response in ended]
        return []

    @torch.inference_mode()
    def cancel(self, sample_ids: Collection[str]) -> None:
        names = self._names.intersection(sample_ids)
        if not names:
            return
        gone = [one for one in (*self._waiting, *self._active) if one.request.sample_id in names]
        self._waiting = deque(one for one in self._waiting if one.request.sample_id not in names)
        self._leave(gone)

    def progress(self, since: Mapping[str, int]) -> list[Unfinished]:
        grown = (one.since(since.get(one.request.sample_id, 0)) for one in (*self._active, *self._waiting))
        return [each for each in grown if each.token_ids]

    @torch.inference_mode()
    def take_back(self, *, keep_cache: bool = False) -> list[Unfinished]:
        caches: dict[Response, Kept | None] = {}
        if keep_cache:
            slot_of = {prompt: slot for slot, prompt in enumerate(self._held)}
            caches = {response: response.kept for response in self._waiting}
            caches |= {one: self._past(slot_of, place, one) for place, one in enumerate(self._active)}
        responses = sorted((*self._active, *self._waiting), key=lambda response: response.number)
        self._waiting.clear()
        self._leave(responses)
        return [replace(response.unfinished, cache=caches.get(response)) for response in responses]

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for held in (self._prompts, self._names, self._waiting, self._active, self._held, self._kept):
            held.clear()
        self._cache = self.token_pass.new_cache()
        self._weights.close()
        self._on_close()

    def weights_changed(self, version: int) -> None:
        """Drop everything that was computed with older weights. Raises: RuntimeError when responses are in progress."""
        if self._waiting or self._active:
            count = len(self._waiting) + len(self._active)
            raise RuntimeError(f"the weights change while {count} responses are in progress: close the stream first")
        self.version = version
        self._kept.clear()
        self._weights.close()
        self._has_weights = False

    # ------------------------------------------------------------------------------------------------- one pass

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """Run one prefill, or decode one token for every active response. Returns: the ended responses, whose slots are free.

        Raises: RunStopped when the model's logits are not finite.
        """
        self.passes += 1
        if not self._has_weights:
            self._weights.enter_context(self.token_pass.holding_weights())
            self._has_weights = True
        admitted = self._admit(self.slots - len(self._active)) if self._admits() else []
        if admitted:
            self._passed_over = 0
            self._prefill(admitted)
            self._draw(admitted, first_logits)
            self._active += admitted
        else:
            self._decode()
        if self._on_tokens:
            self._on_tokens(len(admitted or self._active))
        ended = [response for response in self._active if response.stop_reason is not None]
        self._keep(ended)
        self._leave(ended)
        return ended

    def _admits(self) -> bool:
        """Return True when it is time for a prefill, which takes a whole pass for any number of requests. While others are being
        sampled it waits until an eighth of the slots is free, or all waiting requests fit; and, for a few passes, until these
        are an eighth of the requests in progress."""
        waiting, active = len(self._waiting), len(self._active)
        if active and self.slots - active < min(waiting, max(1, self.slots // 8)):
            return False
        if 0 < waiting < active // 8 and self._passed_over < PATIENCE:
            self._passed_over += 1
            return False
        return waiting > 0

    def _admit(self, free: int) -> list[Response]:
        """Take the next requests, as many as slots, prompt slots and prefill tokens allow: at least one when none is active."""
        admitted: list[Response] = []
        known = set(self._held)
        stems = {prompt.stem_tokens for prompt in known if prompt.stem}
        tokens = 0
        while self._waiting and len(admitted) < free:
            response = self._waiting[0]
            prompt = response.prompt
            if prompt not in known:
                tokens += len(prompt.token_ids) - (self._reusable(response) or shared_tokens(prompt, stems))
                if len(known) == self.prompt_slots or (admitted and tokens > self.max_prefill_tokens):
                    break
                known.add(prompt)
                stems |= {prompt.stem_tokens} if prompt.stem else set()
            admitted.append(self._waiting.popleft())
        return admitted

    def _reusable(self, response: Response) -> int:
        """Count the prompt's tokens whose keys and values are cached. The last token never counts: its logits are needed."""
        if response.kept is not None:
            return len(response.kept.token_ids)
        if response.prompt.scored != UNSCORED or response.request.images:
            return 0  # the log-probs of all prompt tokens are requested, or equal tokens may belong to other images
        kept, wanted = self._kept.get(response.request.conversation), response.prompt.token_ids
        if kept is None:
            return 0
        alike = min(common(kept.token_ids, wanted), len(wanted) - 1)
        return alike if not self._whole or alike == len(kept.token_ids) else 0

    def _prefill(self, admitted: Sequence[Response]) -> None:
        """Prefill each prompt that is not cached yet, packed, into the next prompt slots."""
        held, known = list(self._held), set(self._held)
        new: list[tuple[PromptState, int]] = []
        for response in admitted:
            prompt = response.prompt
            if prompt in known:
                continue
            known.add(prompt)
            reused = self._reusable(response)
            if reused:
                kept = response.kept or self._kept.pop(response.request.conversation)
                self._cache.put(kept.past, len(self._held), reused)
                prompt.shift = kept.shift
            new.append((prompt, reused))
            self._held.append(prompt)
        if not new:
            return
        plan = plan_prefill(held, new)
        row = list(plan.placed())
        tokens, placed = plan.token_ids, images_of(plan)
        self._cache.prefilling(
            [(start, end, part.slot, part.known) for part, start, end in row], plan.copies, plan.split
        )
        images = [each for _, each in placed]
        inputs = model_inputs(self.model, self._tensor(tokens), self._tensor(plan.positions), images)
        # Of a prompt's parts the last one counts.
        ends = {part.prompt: end - 1 for part, _, end in row}
        scored = max(prompt.scored for prompt in ends)
        with self._recording() as recorded:
            logits, logprobs, top = self.token_pass.prefill(
                inputs,
                continued_layout([(part.known, end - start) for part, start, end in row], self.model.device),
                self._cache,
                self._tensor(list(ends.values())),
                None if scored == UNSCORED else self._tensor([*tokens[1:], tokens[0]]),
                top=scored,
            )
        for prompt, its_logits in zip(ends, logits, strict=True):
            prompt.logits = its_logits
        if self.routers:
            chosen = experts_of_prompts(plan, self._held, self.routers.stacked(recorded).cpu().numpy())
            for prompt, experts in chosen.items():
                prompt.experts = experts
        for prompt, its_images in placed:
            prompt.shift = position_shift(inputs["position_ids"], its_images.start, its_images.end)
        if logprobs is None:
            return
        for part, start, end in row:
            prompt = part.prompt
            # The token after a prompt's end belongs to no prompt.
            if prompt.scored != UNSCORED:
                prompt.logprobs = tuple(logprobs[start : end - 1].tolist())
                prompt.top = tuple(place[: prompt.scored] for place in top[start : end - 1]) if prompt.scored else ()

    def _decode(self) -> None:
        """Decode one token for every active response."""
        active = self._active
        slot_of = {prompt: slot for slot, prompt in enumerate(self._held)}
        # Padding rows repeat the last row; they are computed in free slots, and their results are ignored.
        filled = active + [active[-1]] * (self.token_pass.rows_for(len(active), self.slots) - len(active))
        prompt_lens = [len(response.prompt.token_ids) for response in filled]
        response_lens = [response.cached for response in filled]
        self._cache.decoding([slot_of[response.prompt] for response in filled], prompt_lens, response_lens)
        positions = [sum(lens) for lens in zip(prompt_lens, response_lens, strict=True)]
        with self._recording() as recorded:
            hidden = self.token_pass(
                self._tensor([response.token_ids[-1] for response in filled]),
                self._tensor([at + response.prompt.shift for at, response in zip(positions, filled, strict=True)]),
                self._cache,
            )
        if self.routers:
            for response, chosen in zip(active, self.routers.stacked(recorded).cpu().numpy(), strict=False):
                response.experts.append(chosen)
        pieces = iter(hidden.split(logit_rows(hidden.device)))  # as _draw asks for them
        self._draw(active, lambda some: self.token_pass.logits(next(pieces)[: len(some)]))

    def _draw(self, responses: list[Response], logits: Callable[[list[Response]], Tensor]) -> None:
        """Draw the next token of each response and record if it ends. ``logits`` is called for consecutive responses."""
        count = logit_rows(self.model.device)
        for first in range(0, len(responses), count):
            some = responses[first : first + count]
            drawn, their_logprobs = draw_next_tokens(some, logits(some), self.sampling)
            tokens, logprobs = drawn.tolist(), their_logprobs.tolist()
            if not all(map(math.isfinite, logprobs)):
                raise RunStopped(
                    f"the model's logits are not finite while sampling, with weights of version {self.version}: the "
                    "weights have diverged or hold NaN; resume from an earlier checkpoint with a lower learning rate"
                )
            for response, token, logprob in zip(some, tokens, logprobs, strict=True):
                response.token_ids.append(token)
                response.logprobs.append(logprob)
                response.stop_reason = stop_reason(response, self.sampling, self.end_tokens, self.tokenizer)

    # -------------------------------------------------------------------------------------- after a response has ended

    def _keep(self, ended: Sequence[Response]) -> None:
        """Keep the caches of conversations for their next turns; of more than there are slots, the oldest are dropped."""
        slot_of = {prompt: slot for slot, prompt in enumerate(self._held)}
        for slot, response in enumerate(self._active):
            if response.stop_reason is None:
                continue
            if response.request.conversation:
                self._kept.pop(response.request.conversation, None)
                self._kept[response.request.conversation] = self._past(slot_of, slot, response)
        while len(self._kept) > self.slots:
            del self._kept[next(iter(self._kept))]

    def _past(self, slot_of: Mapping[PromptState, int], slot: int, response: Response) -> Kept:
        """Copy the keys and values of a response and its prompt: of all tokens but the newest."""
        prompt = response.prompt
        past = self._cache.take(slot_of[prompt], len(prompt.token_ids), slot, response.cached)
        return Kept((*prompt.token_ids, *response.token_ids[response.begun : -1]), past, prompt.shift)

    def _leave(self, responses: Sequence[Response]) -> None:
        """Close the gaps that these responses, and prompts without responses in progress, leave in the slots."""
        gone = set(responses)
        if not gone:
            return
        for response in responses:
            self._names.discard(response.request.sample_id)
            response.prompt.users -= 1
            if response.prompt.users == 0:
                del self._prompts[response.prompt.key]
        self._active = close_gaps(
            self._active,
            gone=lambda response: response in gone,
            move=lambda source, target, response: self._cache.move_response(source, target, response.cached),
        )
        # The next requests may begin with a prompt that is still in its slot.
        needed = {response.prompt for response in (*self._active, *islice(self._waiting, 1))}
        self._held = close_gaps(
            self._held,
            gone=lambda prompt: prompt not in needed,
            move=lambda source, target, prompt: self._cache.move_prompt(source, target, len(prompt.token_ids)),
        )

    def trajectory(self, response: Response) -> Trajectory:
        """Return an ended response as a trajectory."""
        return trajectory_of(response, self.tokenizer, self.sampling)

    def _recording(self) -> AbstractContextManager[Mapping[int, Tensor]]:
        return self.routers.recording() if self.routers else nullcontext({})

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.model.device)
