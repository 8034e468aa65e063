"""Settings of sampling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from posttrain.config.base import Section

MOST_TOKENS = 100_000_000  # of a sequence: beyond every context that a model has


class SamplingConfig(Section):
    samples_per_prompt: int = Field(default=8, ge=1, le=1_000_000)
    """Responses sampled for each prompt (the group of GRPO)."""
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    """Divides the logits, in sampling and in every log-prob of the trainer; 0 is greedy (validation only)."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than this share of the most likely token; 0 keeps all."""
    max_response_tokens: int = Field(default=256, ge=1, le=MOST_TOKENS)
    """Longest response, in tokens, the stop token included."""
    stop: list[str] = []
    """Texts that end a response; the text stays in it."""
    stop_token_ids: list[int] = []
    """Token ids that end a response, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's end token until max_response_tokens."""
    engine_sampling: dict[str, Any] = {}
    """Further sampling parameters in the engine's own words, such as repetition_penalty; the native engine knows none."""


class RolloutConfig(SamplingConfig):
    first_token_temperature: float | None = Field(default=None, gt=0.0, le=100.0)
    """Temperature of the first token of every response, and of every turn (FIRE, arXiv:2410.21236); null: as of the others."""
    first_token_top_k: int = Field(default=16, ge=0)
    """Most likely tokens that this first token is drawn from; 0 keeps all."""
    routing_replay: bool = False
    """The trainer sends every token of a mixture of experts to the experts that it had while it was sampled (arXiv:2510.11370),
    in old log-probs and updates; with the samplers native and vllm."""
    engine: str = "native"
    """Sampler: native samples from the weights being trained, and so does hf (slowly, by model.generate); vllm, sglang and http
    (any server that speaks OpenAI's completions) have a copy of the weights, which is sent to them after every step."""
    weights: Literal["compute_dtype", "int8"] = "compute_dtype"
    """Weights to sample with: as they are trained, in model.compute_dtype; or int8 (native), rounded to 8 bits with one scale for
    every output of a layer after each sync: faster where few sequences are decoded side by side, and farther from the
    trainer's log-probs. Training corrects for that by loss.rollout_correction.weights=token, unless that section sets weights."""
    endpoints: list[str] = []
    """Addresses of samplers that run already, such as [http://host:8000]; empty: vllm and sglang are started by the run."""
    timeout_s: float = Field(default=600.0, gt=0.0, le=1e7)
    """Time that a server has for one response, tries and waits included; a response that takes longer has failed."""
    retries: int = Field(default=3, ge=0)
    """Further tries of a request that a server fails."""
    weight_sync: Literal["auto", "in_memory", "disk", "collective", "adapter", "shared_memory"] = "auto"
    """Transfer of new weights to the sampler: in_memory (native, hf), by a folder, by a broadcast to one vLLM server, or of a
    LoRA adapter its tensors alone (vllm); auto is in_memory where the sampler shares them, adapter for a vLLM that the run
    starts and a policy with LoRA, and disk elsewhere. In a run with workers (placement.runtime=ray), samplers with devices of
    their own, and servers that it starts, get them through shared_memory (auto) or by a broadcast (collective), and servers also
    through a folder (disk); an adapter alone (auto with LoRA and vllm, or adapter) goes through shared memory."""
    weight_folder: str | None = None
    """Folder through which weights go, which the samplers see under the same name; null makes a temporary one."""
    weight_bucket_mib: int = Field(default=512, ge=1, le=1_000_000)
    """Weights that are copied or broadcast at a time (a larger tensor has a bucket of its own), MiB."""
    weight_hash_every_steps: int | None = Field(default=None, ge=1)
    """Tell a hash of the weights that are sampled from, at the start and then at every so many steps' ends; null means never.
    Copies are compared by such hashes at every sync in any case."""
    max_concurrent_sequences: int = Field(default=256, ge=1)
    """Sequences decoded side by side; the rest wait their turn."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens in one prefill pass."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share one copy of the sampler."""
    engine_options: dict[str, Any] = {}
    """Options for the sampler in its own words (docs/rollout.md); native and hf read none."""
    devices: list[int] | None = None
    """Devices of the sampler, by number; null means all."""
    replay_folder: str | None = None
    """Folder of responses (docs/rollout.md): a training step that it holds is not sampled but read, and the responses of every
    other step are written to it; in asynchronous.mode colocate and separate the same holds for each group. A file that is of
    another model, other prompts or another distribution stops the run. Validation is always sampled."""
    replay_steps: list[int] | None = None
    """Steps that replay_folder holds or is to hold, from 1; in colocate and separate, groups in the order of their admission.
    All others are sampled as without it. null means every one."""


class ValidationConfig(SamplingConfig):
    samples_per_prompt: int = Field(default=1, ge=1, le=1_000_000)
    """Responses sampled for each validation prompt."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """Temperature, as in rollout; 0 is greedy."""
    max_response_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)  # type: ignore[assignment]
    """Longest validation response, in tokens; null means rollout.max_response_tokens."""
    every_steps: int | None = Field(default=None, ge=1)
    """Validate after every so many steps, besides the end; null means only at the ends."""
    before_training: bool = True
    """Validate the starting weights."""
    after_training: bool = True
    """Validate after the last step."""
    only: bool = False
    """Validate the starting weights (of a run that resumes, its newest checkpoint's) and end, without a step or a checkpoint."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Use only the first so many validation prompts; null means all."""
    trainer_logprobs: bool = False
    """Have the trainer score the first 100,000 tokens of every validation, for their gap to the sampler in the report."""
