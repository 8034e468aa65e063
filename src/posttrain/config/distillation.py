"""Learning from teachers: which models, the divergence from them, and its part in what is learned."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from posttrain.config.algorithm import AlgorithmSection
from posttrain.config.base import Section
from posttrain.registry import DIVERGENCES, Registry

COLDEST, HOTTEST = 1e-3, 100.0  # temperatures: below, logits leave float32; above, every distribution is uniform
LEAST, MOST = 1e-6, 1e4  # weights
QUEUE = "tcp://"  # beginning of the address of a teacher of verl's recipe gkd
ROLE = "teacher "  # beginning of the role's name in a placement; the teacher's own name follows


class TeacherConfig(Section):
    path: str | None = None
    """Folder or hub id of the teacher, whose tokenizer must be the student's; null for one in a server."""
    endpoints: list[str] = []
    """URLs of servers that answer completions with prompt_logprobs, as vLLM's do, such as http://host:8000/v1, or addresses of
    the teachers of verl's recipe gkd, such as tcp://host:15555; requests are divided among them. Empty means that the run loads
    the teacher itself."""
    served_model: str | None = None
    """The teacher's name in the server; null means the only model it serves."""
    api_key_variable: str | None = None
    """Environment variable with the server's key; null sends none."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds that a server has for one request."""
    coef: float = Field(default=1.0, ge=0.0, le=MOST)
    """Weight of this teacher beside the others."""
    data_sources: list[str] = []
    """Rows with one of these data sources have this teacher; empty means all rows."""
    sequences_per_micro_batch_per_device: int = Field(default=32, ge=1)
    """Sequences per forward pass of the teacher; requests at a time to each server."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Cut those passes by this many tokens per device instead of by count; null cuts by count."""
    offload: bool = False
    """Keep its weights in CPU memory except while it scores a step; for accelerators."""
    engine_options: dict[str, Any] = {}
    """Options for the teacher's engine, as policy.engine_options."""
    devices: list[int] | None = None
    """Devices of the teacher, by number; null means all."""

    @property
    def queued(self) -> bool:
        """True for servers that speak the recipe gkd's protocol."""
        return any(url.startswith(QUEUE) for url in self.endpoints)


class DivergenceConfig(AlgorithmSection):
    registry: ClassVar[Registry[Any]] = DIVERGENCES

    name: str = "sampled_kl"
    """Divergence of the student from a teacher: a built-in one, or, with path, the name of your function in that file."""


class DistillationConfig(Section):
    """Settings of every run with teachers."""

    teachers: dict[str, TeacherConfig] = {}
    """The teachers, by names of your choice; empty means that there is none."""
    divergence: DivergenceConfig = Field(default_factory=DivergenceConfig)
    """Distance of the student from a teacher at a token."""
    top_k: int | None = Field(default=None, ge=1)
    """Compare the teacher's so many most likely tokens, which it gives before the update; null compares the whole
    vocabulary, inside the student's own forward pass. Divergences of sampled tokens read neither."""
    top_k_rest: Literal["bucket", "renormalize", "drop"] = "bucket"
    """The tokens outside the top k: bucket takes them as one more token, renormalize leaves them out and makes the others sum to
    1 (ROLL), drop leaves them out and nothing else (verl), with a divergence of at least 0."""
    temperature: float | None = Field(default=None, ge=COLDEST, le=HOTTEST)
    """Divides the logits of student and teacher in the divergence; null means rollout.temperature, and 1 for texts."""
    teacher_temperature: float = Field(default=1.0, ge=COLDEST, le=HOTTEST)
    """Divides the teacher's logits besides."""
    min_logprob: float | None = Field(default=None, lt=0.0)
    """Log-probs over the vocabulary below this count as this, in nats; null leaves them."""
    clip: float | None = Field(default=None, gt=0.0)
    """Cut the divergence at a token to plus or minus this, in nats; null does not cut."""
    coef: float = Field(default=1.0, ge=LEAST, le=MOST)
    """Weight of the divergence."""

    @property
    def used(self) -> bool:
        return bool(self.teachers)

    @property
    def of_sampled_tokens(self) -> bool:
        """True when the divergence reads the log-probs of the sampled tokens alone."""
        return bool(self.divergence.about.facts.of_sampled_tokens)

    @property
    def beside_the_student(self) -> bool:
        """True when teachers are computed inside the student's forward pass, over the whole vocabulary."""
        return self.used and not self.of_sampled_tokens and self.top_k is None


class OnPolicyDistillationConfig(DistillationConfig):
    """Teachers of responses that the student samples."""

    enters: Literal["advantage", "loss"] = "advantage"
    """advantage: what the divergence costs at a token is taken from the token's advantage; loss: it is a term of the loss, with
    a gradient of its own."""
    with_rewards: bool = False
    """Learn from rewards as well; false: rewards are measured, if there are any, and nothing is learned from them."""

    @property
    def alone(self) -> bool:
        """True when nothing but teachers is learned from."""
        return self.used and not self.with_rewards


class TextDistillationConfig(DistillationConfig):
    """Teachers of texts in a file."""

    divergence: DivergenceConfig = Field(default_factory=lambda: DivergenceConfig(name="forward_kl"))
    """Distance of the student from a teacher at a token."""
    text_coef: float = Field(default=0.0, ge=0.0, le=MOST)
    """Weight of the usual loss, -log pi of the text's own tokens, beside the divergence."""
    on_prompts: bool = False
    """Learn the tokens of prompts, too: every token of a text but the first."""
