"""The native engine: sampling from the trainer's own weights, so no weight transfer is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.rollout.native.stream import NativeStream
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens, Request
from posttrain.libraries.grammars import Grammars
from posttrain.models.loading import end_token_ids
from posttrain.models.routing import routers_of
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup
from posttrain.registry import ROLLOUT_ENGINES


@ROLLOUT_ENGINES.register(
    "native",
    shares_weights=True,
    reads_images=True,
    reads_options=False,
    reads_sampling=False,
    resumes_responses=True,
    keeps_cache=True,
    records_experts=True,
    seeds_of_requests=True,
    samplings_of_requests=True,
    reports_top_logprobs=True,
    prompt_logprobs_of_requests=True,
    grammars_of_requests=True,
    rounds_weights=True,
)
class NativeEngine:
    """See interfaces.rollout_engine.RolloutEngine."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent_sequences: int,
        max_prefill_tokens: int,
        records_experts: bool = False,  # of every token of a mixture of experts
        weights: Literal["compute_dtype", "int8"] = "compute_dtype",  # rollout.weights
    ):
        self.routers = routers_of(model, "rollout.routing_replay") if records_experts else None
        self.model = model
        self.tokenizer = tokenizer
        self.end_tokens = end_token_ids(model, tokenizer)
        self.max_concurrent_sequences = max_concurrent_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self.token_pass = TokenPass(model, int8=weights == "int8")
        self._version = 0
        self._stream: NativeStream | None = None
        self._grammars: Grammars | None = None

    def grammars(self) -> Grammars:
        """Return the grammars over the tokenizer's tokens. Raises: ValueError where there can be none."""
        if self._grammars is None:
            vocabulary = self.model.get_output_embeddings().weight.shape[0]
            self._grammars = Grammars(self.tokenizer, vocabulary, self.end_tokens)
        return self._grammars

    @property
    def version(self) -> int:
        return self._version

    @property
    def note(self) -> str:
        """Message for the user when sampling is computed in an unusual way; "" otherwise."""
        return self.token_pass.note

    def weights_changed(self, version: int) -> None:
        if self._stream is not None:
            self._stream.weights_changed(version)
        if version != self._version:  # else a run begins with the weights that the trial has packed
            self.token_pass.weights_changed()
        self._version = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        """See interfaces.rollout_engine. Raises: RunStopped when the model's logits are not finite."""
        samples = sampling.samples_per_prompt
        # Twice the prompt slots of full groups: the last responses of nearly finished groups keep their prompts' slots.
        prompt_slots = 2 * -(-min(self.max_concurrent_sequences, samples * len(prompts)) // samples)
        groups: dict[int, TrajectoryGroup] = {}
        with self._open(sampling, on_tokens, prompt_slots) as stream:
            members = [
                [stream.add(Request.of(prompt, number, sampling.max_response_tokens)) for number in range(samples)]
                for prompt in prompts
            ]
            group_of = {response: group for group, responses in enumerate(members) for response in responses}
            while len(groups) < len(prompts):
                for group in sorted({group_of[response] for response in stream.step()}):
                    if all(response.stop_reason is not None for response in members[group]):
                        trajectories = tuple(stream.trajectory(response) for response in members[group])
                        groups[group] = TrajectoryGroup(prompt=prompts[group], trajectories=trajectories)
                        if on_group:
                            on_group(groups[group])
        return [groups[group] for group in range(len(prompts))]

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> NativeStream:
        """See interfaces.rollout_engine. An open stream holds keys and values. In bfloat16 on a CPU, and with weights of
        eight bits, the engine holds a copy of the weights from its first stream until they change."""
        return self._open(sampling, on_tokens, self.max_concurrent_sequences)

    def _open(self, sampling: SamplingParams, on_tokens: OnTokens | None, prompt_slots: int) -> NativeStream:
        if self._stream is not None:
            raise RuntimeError("a stream of this sampler is open: close it first")
        self._stream = NativeStream(
            self.model,
            self.tokenizer,
            self.token_pass,
            sampling,
            end_tokens=self.end_tokens,
            version=self._version,
            slots=self.max_concurrent_sequences,
            prompt_slots=prompt_slots,
            max_prefill_tokens=self.max_prefill_tokens,
            on_tokens=on_tokens,
            on_close=self._closed,
            routers=self.routers,
            grammars=self.grammars,
        )
        return self._stream

    def _closed(self) -> None:
        self._stream = None
