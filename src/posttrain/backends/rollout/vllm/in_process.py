"""vLLM's ``LLM`` in this process, where this Python has vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.backends.rollout.vllm.experts import RUNNER, of_routed_layers
from posttrain.backends.rollout.vllm.options import engine_arguments, frees_cache
from posttrain.backends.rollout.vllm.server import EXTENSION
from posttrain.backends.rollout.vllm.stream import VllmStream
from posttrain.backends.serving.images import image_token_of
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, OnGroup, OnTokens, Request, SamplerPlan, Served
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup


class VllmInProcessEngine:
    """See interfaces.rollout_engine.WeightTaker. Groups are returned in the order in which the scheduler finishes them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, plan: SamplerPlan):
        from vllm import LLM

        if plan.expert_layers:
            os.environ |= RUNNER  # read when the engine is made
        self.tokenizer = tokenizer
        self.end_tokens = plan.end_tokens
        self.llm: Any = LLM(**{"disable_log_stats": True} | engine_arguments(plan), worker_extension_cls=EXTENSION)
        self._model = plan.model_path, plan.trust_remote_code
        self._image_token: int | None = None  # known once a prompt has images
        self._expert_layers = plan.expert_layers
        self._frees = frees_cache(plan) and plan.cuda
        self._asleep = False
        self._version = 0
        self.content_hash = ""
        self.note = plan.note
        self.adapter: Any = None  # vLLM's request for the adapter that is served; None: no adapter
        self._stream: VllmStream | None = None

    @property
    def version(self) -> int:
        return self._version

    def weights_changed(self, version: int) -> None:
        self._refuse_while_busy()
        self._version = version

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        return self._take("posttrain_load", (str(folder), announced.content_hash), announced)

    def load_adapter(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        from vllm.lora.request import LoRARequest

        reports = self._take("posttrain_adapter", (str(folder), announced.content_hash), announced)
        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        adapter = LoRARequest(f"policy-{announced.version}", number, str(folder))
        if not self.llm.llm_engine.add_lora(adapter):
            raise RunStopped(f"vLLM could not load the adapter of version {announced.version}")
        if self.adapter is not None:
            self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = adapter
        return reports

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        place = (group.backend, group.address, str(group.port), str(group.first_rank), str(group.size))
        words = (manifest, *place, str(group.bucket_bytes), str(group.timeout_s))
        return self._take("posttrain_receive", words, announced)

    def _take(self, method: str, words: tuple[str, ...], announced: Served) -> list[tuple[str, Served]]:
        self._refuse_while_busy()
        self.wake()
        reports = []
        for report in self.llm.collective_rpc(method, args=words):
            if "error" in report:
                raise RunStopped(f"vLLM rejected the weights: {report['error']}")
            reports.append(("vLLM", Served(report["version"], report["content_hash"])))
        self.llm.reset_prefix_cache()
        self.content_hash = announced.content_hash
        return reports

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        samples = sampling.samples_per_prompt
        groups: dict[int, TrajectoryGroup] = {}
        with self.open_stream(sampling, on_tokens) as stream:
            numbers = [
                [stream.add(Request.of(prompt, number, sampling.max_response_tokens)) for number in range(samples)]
                for prompt in prompts
            ]
            group_of = {number: group for group, of_group in enumerate(numbers) for number in of_group}
            ended: dict[str, Trajectory] = {}
            while len(groups) < len(prompts):
                for number, trajectory in stream.step():
                    ended[number] = trajectory
                    group = group_of[number]
                    if all(each in ended for each in numbers[group]):
                        trajectories = tuple(ended[each] for each in numbers[group])
                        groups[group] = TrajectoryGroup(prompt=prompts[group], trajectories=trajectories)
                        if on_group:
                            on_group(groups[group])
        return [groups[group] for group in range(len(prompts))]

    def open_stream(self, sampling: SamplingParams, on_tokens: OnTokens | None = None) -> VllmStream:
        """See interfaces.rollout_engine. Requests join at the scheduler's next step; its prefix cache serves conversations."""
        if self._stream is not None and not self._stream.closed:
            raise RuntimeError("a stream of this sampler is open: close it first")
        self.wake()
        self._stream = VllmStream(self, sampling, on_tokens)
        return self._stream

    def _refuse_while_busy(self) -> None:
        if self._stream is not None and self._stream.busy:
            raise RuntimeError("the weights change while responses are in progress: close the stream first")

    def image_token(self) -> int:
        """Return the token of an image. Raises: ModelError for a family whose images are not sent to vLLM."""
        if self._image_token is None:
            self._image_token = image_token_of(*self._model, "vllm")
        return self._image_token

    def rest(self) -> None:
        """Free memory, where the options request it."""
        if self._frees:
            self.llm.sleep(level=1)  # keeps the weights in host memory
            self._asleep = True

    def params(self, sampling: SamplingParams, seed: int) -> Any:
        """Return vLLM's sampling parameters."""
        from vllm import SamplingParams as VllmSamplingParams

        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.end_tokens)}
        values = {
            "n": 1,
            "seed": seed,
            "max_tokens": sampling.max_response_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(ends),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,
            "prompt_logprobs": 0 if sampling.prompt_logprobs else None,
        }
        return VllmSamplingParams(**(values | dict(sampling.engine_sampling)))

    def trajectory(self, sample_id: str, output: Any, sampling: SamplingParams) -> Trajectory:
        """Convert a finished request to a trajectory. Raises: RunStopped when vLLM did not finish it."""
        finished, output = output, output.outputs[0]
        tokens = list(output.token_ids)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.end_tokens)}
        if output.finish_reason not in ("stop", "length") or not tokens:
            raise RunStopped(f"vLLM ended {sample_id} after {len(tokens)} tokens: {output.finish_reason}")
        if tokens[-1] in ends:
            reason = StopReason.EOS
        elif output.finish_reason == "length":
            reason = StopReason.LENGTH
        else:
            reason = StopReason.STOP_TEXT if sampling.stop else StopReason.EOS
        return Trajectory(
            sample_id=sample_id,
            token_ids=tuple(tokens),
            logprobs=tuple(step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)),
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
            stop_reason=reason,
            policy_version=self._version,
            prompt_logprobs=tuple(
                place[token].logprob
                for place, token in zip(finished.prompt_logprobs or (), finished.prompt_token_ids, strict=False)
                if place is not None  # None for the first token
            ),
            experts=of_routed_layers(
                getattr(output, "routed_experts", None),
                len(finished.prompt_token_ids) + len(tokens) - 1,
                self._expert_layers,
            )
            if self._expert_layers
            else None,
        )

    def joined(self, first: Trajectory, rest: Trajectory) -> Trajectory:
        """A response that was requested in two parts."""
        tokens = [*first.token_ids, *rest.token_ids]
        return replace(
            rest,
            token_ids=tuple(tokens),
            logprobs=(*first.logprobs, *rest.logprobs),
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
            prompt_logprobs=first.prompt_logprobs,
        )

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False
