"""A language model of the run's own that grades responses."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from posttrain.config.base import Section

JUDGE = "judge"  # name of reward.judge, and beginning of the roles of further judges, whose names follow


class JudgeConfig(Section):
    """A frozen language model, sampled on the run's devices. A judge behind a server is the reward term llm_judge."""

    path: str
    """Folder or hub id of a Hugging Face causal language model with a chat template."""
    data_sources: list[str] = []
    """Grade responses to prompts of these data sources only; empty means all."""
    weight: float = 1.0
    """Factor of its verdict in the reward."""
    prompt_template: str | None = None
    """Question, with {response}, {prompt} and {ground_truth} in it; null means that of the reward term llm_judge."""
    extract: str | None = None
    """Regular expression whose last match in its answer holds the verdict, in its first group when it has one; null reads a
    number from 0 to 1, yes or no in the last line."""
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    """Temperature of its answers; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest answer, in tokens; one that is cut there is no verdict."""
    max_prompt_tokens: int = Field(default=8192, ge=1)
    """Longest question, in tokens; a response that makes it longer is without a verdict."""
    chat_template_options: dict[str, str | int | float | bool | None] = {}
    """Extra variables for its chat template, such as enable_thinking."""
    engine: str = "native"
    """Sampler: native, hf, vllm, sglang, as in rollout.engine."""
    engine_options: dict[str, Any] = {}
    """Options for that sampler in its own words."""
    max_concurrent_sequences: int = Field(default=64, ge=1)
    """Answers decoded side by side."""
    trust_remote_code: bool = False
    """Allow code from the model's folder to run."""
    devices: list[int] | None = None
    """Devices of the judge, by number, a copy on each; null means all."""


def shows_reference(judge: JudgeConfig) -> bool:
    """Tell whether a judge's question holds the reference answer, as the usual one does."""
    return judge.prompt_template is None or "{ground_truth}" in judge.prompt_template


def judge_field(name: str) -> str:
    """Return the section of a judge in a configuration."""
    return f"reward.{JUDGE}" if name == JUDGE else f"reward.more_judges.{name}"


def judge_role(name: str) -> str:
    """Return the role of a judge in a placement."""
    return JUDGE if name == JUDGE else f"{JUDGE} {name}"


def is_judge(role: str) -> bool:
    """Return True for the role of a judge."""
    return role == JUDGE or role.startswith(f"{JUDGE} ")
