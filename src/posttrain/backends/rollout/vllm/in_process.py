"""vLLM's ``LLM`` in this process, where this Python has vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.backends.rollout.vllm.options import engine_arguments, frees_cache
from posttrain.backends.rollout.vllm.server import EXTENSION
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import BroadcastPlan, OnGroup, OnTokens, SamplerPlan, Served
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup


class VllmInProcessEngine:
    """See interfaces.rollout_engine.WeightTaker. Groups are handed on as the scheduler finishes them."""

    note = ""  # it computes in its usual way

    def __init__(self, tokenizer: PreTrainedTokenizerBase, plan: SamplerPlan):
        from vllm import LLM

        self.tokenizer = tokenizer
        self.end_tokens = plan.end_tokens
        self._llm: Any = LLM(**{"disable_log_stats": True} | engine_arguments(plan), worker_extension_cls=EXTENSION)
        self._frees = frees_cache(plan) and plan.cuda
        self._asleep = False
        self._version = 0
        self.content_hash = ""
        self._calls = 0

    @property
    def version(self) -> int:
        return self._version

    def weights_changed(self, version: int) -> None:
        self._version = version

    def load_folder(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        return self._take("posttrain_load", (str(folder), announced.content_hash), announced)

    def receive(self, manifest: str, announced: Served, group: BroadcastPlan) -> list[tuple[str, Served]]:
        words = (manifest, group.backend, group.address, str(group.port), "1", str(group.size))
        return self._take("posttrain_receive", (*words, str(group.bucket_bytes), str(group.timeout_s)), announced)

    def _take(self, method: str, words: tuple[str, ...], announced: Served) -> list[tuple[str, Served]]:
        self._wake()
        reports = []
        for report in self._llm.collective_rpc(method, args=words):
            if "error" in report:
                raise RunStopped(f"vLLM refuses the weights: {report['error']}")
            reports.append(("vLLM", Served(report["version"], report["content_hash"])))
        self._llm.reset_prefix_cache()
        self.content_hash = announced.content_hash
        return reports

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        on_group: OnGroup | None = None,
    ) -> list[TrajectoryGroup]:
        self._wake()
        engine = self._llm.llm_engine
        self._calls += 1
        places: dict[str, tuple[int, int]] = {}
        for group, prompt in enumerate(prompts):
            for number in range(sampling.samples_per_prompt):
                name = f"{self._calls}-{group}-{number}"
                places[name] = (group, number)
                seed = sampling.request_seed(f"{prompt.prompt_id}/{number}")
                engine.add_request(name, {"prompt_token_ids": list(prompt.token_ids)}, self._params(sampling, seed))
        responses: list[dict[int, Trajectory]] = [{} for _ in prompts]
        groups: dict[int, TrajectoryGroup] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                group, number = places[output.request_id]
                trajectory = self._trajectory(prompts[group], number, output.outputs[0], sampling)
                responses[group][number] = trajectory
                if on_tokens:
                    on_tokens(len(trajectory.token_ids))
                if len(responses[group]) == sampling.samples_per_prompt:
                    ordered = tuple(responses[group][each] for each in range(sampling.samples_per_prompt))
                    groups[group] = TrajectoryGroup(prompt=prompts[group], trajectories=ordered)
                    if on_group:
                        on_group(groups[group])
        if self._frees:
            self._llm.sleep(level=1)  # weights wait in host memory
            self._asleep = True
        return [groups[group] for group in range(len(prompts))]

    def _params(self, sampling: SamplingParams, seed: int) -> Any:
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
        }
        return VllmSamplingParams(**(values | dict(sampling.engine_sampling)))

    def _trajectory(self, prompt: Prompt, number: int, output: Any, sampling: SamplingParams) -> Trajectory:
        tokens = list(output.token_ids)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.end_tokens)}
        if output.finish_reason not in ("stop", "length") or not tokens:
            raise RunStopped(
                f"vLLM ended {prompt.prompt_id}/{number} after {len(tokens)} tokens: {output.finish_reason}"
            )
        if tokens[-1] in ends:
            reason = StopReason.EOS
        elif output.finish_reason == "length":
            reason = StopReason.LENGTH
        else:
            reason = StopReason.STOP_TEXT if sampling.stop else StopReason.EOS
        return Trajectory(
            sample_id=f"{prompt.prompt_id}/{number}",
            token_ids=tuple(tokens),
            logprobs=tuple(step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)),
            text=str(self.tokenizer.decode(tokens, skip_special_tokens=True)),
            stop_reason=reason,
            policy_version=self._version,
        )

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
