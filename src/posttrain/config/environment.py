"""The worlds that the policy acts in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from pydantic import Field

from posttrain.config.base import Section

OPEN = "open"  # the environment that programs outside the run play
SINGLE_TURN = "single_turn"  # the environment that gives no reward: the terms score its episodes


class TextGameWording(TypedDict, total=False):
    """Settings that every text game has (see envs.text_game.TextGame)."""

    max_turns: int | None
    instruction: str | None
    template: str
    system: str | None
    action_pattern: str
    action_words: Mapping[str, str]
    format_penalty: float
    max_response_tokens: int | None
    reward_template: str
    answer_format: str
    first_turn: int
    history_turns: int
    turns_apart: bool
    pictures: bool
    pixels_per_cell: int


class NamedEnvironment(Section):
    """The environment of rows that select it by its name in ``environment.named``."""

    name: str
    """Environment: a registered one (docs/environments.md lists them), package.module:Class, or path/to/file.py:Class."""
    settings: dict[str, Any] = {}
    """Settings of the environment's own."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of an episode; null means environment.max_turns."""
    weight: float = Field(default=1.0, ge=0.0)
    """Share of the generated episodes (environment.train_episodes) that are played in it, relative to the others."""
    validation_weight: float | None = Field(default=None, ge=0.0)
    """The same of environment.validation_episodes; null means weight."""


class EnvironmentConfig(Section):
    name: str | None = None
    """Environment of rows that name none: a registered one (docs/environments.md lists them), package.module:Class, or
    path/to/file.py:Class; null, without named ones: a response is one turn, and reward.terms score it."""
    settings: dict[str, Any] = {}
    """Settings of that environment's own."""
    named: dict[str, NamedEnvironment] = {}
    """Further environments, by the names that rows have for them."""
    column: str = "env_class"
    """Column with a row's name for its environment, in named; rows without one are played in the environment called name."""
    train_episodes: int | None = Field(default=None, ge=1)
    """Instead of data.train_files: so many different beginnings, with the seeds 1,000,000 and up; null reads files."""
    validation_episodes: int | None = Field(default=None, ge=1, le=1_000_000)
    """Instead of data.validation_files: so many beginnings, with the seeds 0 and up, which training does not use."""
    max_turns: int | None = Field(default=None, ge=1)
    """Maximum turns per episode; also passed to the environment. null leaves the end to the environment and the context."""
    end_at_max_turns: bool = True
    """End an episode after max_turns even when the environment would continue; false: the environment decides."""
    conversation: Literal["messages", "one_message"] = "messages"
    """messages: actions and observations are messages of the chat template; one_message: together they make up one message of
    the assistant, in which observations are plain text."""
    changed_history: Literal["split", "refuse", "append"] = "split"
    """Handling of a chat template that renders earlier turns differently (without their thoughts, say): split begins a new
    training sample with the new rendering, refuse fails the episode, append continues after the tokens the policy has read."""
    extra_episodes: int = Field(default=0, ge=0)
    """Further episodes begun for each prompt in training: a group takes its first rollout.samples_per_prompt that do not fail,
    and the rest are dropped. Slow ones hold nothing up then, and which are trained on depends on speed: such a run is not
    reproducible, and long episodes are rarer in it."""
    statistics_by_name: bool = False
    """Batch statistics of rewards and advantages (reward.normalize_mean: batch, advantage.whiten, ...) are over the episodes of
    one environment in named; false: over all of the step."""
    sample_per_turn: bool = False
    """Train on every turn as a sample of its own, with what was before it as its prompt; false trains on an episode as one."""
    reward_of: Literal["episode", "last_sample", "last_turn"] = "episode"
    """Turns whose rewards count: those of the whole episode; those in its last training sample (with sample_per_turn, the last
    turn's); or the last turn's alone. The others are left out of rewards, advantages and scores."""
    turn_is_response: bool = False
    """Count every turn, a sample of its own, as a response with the reward of its episode, less the turn's penalty. Groups
    compare turns, mini-batches hold as many turns as they would responses, and a step has as many updates as its turns make."""
    similar_states: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Likeness of the texts of states (ratio of difflib's SequenceMatcher) from which gigpo takes them for one where turns are
    responses: within a group, each is compared with the first of every state. null takes equal ones."""
    close_turns: bool = True
    """Write the template's end of a turn, outside the loss, behind a turn that ended with a stop text or at the token limit."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """No turn begins with more tokens than this before it; null means what the model's positions leave."""
    max_trajectory_tokens: int | None = Field(default=None, ge=1)
    """Longest response of all turns and observations together, in tokens; null has no limit of its own.
    rollout.max_response_tokens is the limit of each turn."""
    max_sequence_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt, turns and observations together, in tokens: a turn gets what is left of it. null means what a turn may
    begin with (max_context_tokens) and a whole turn behind it."""
    workers: int = Field(default=32, ge=0, le=10_000)
    """Environments that live at once, each in a process of its own; 0 steps them in the trainer's process, one after the other,
    which suits those that answer at once and cannot hang."""
    timeout_s: float = Field(default=60.0, gt=0.0, le=1e7)
    """Time that an environment has for one answer; an episode that waits longer has failed."""
    memory_gib: float = Field(default=4.0, gt=0.0)
    """Memory that one environment may take with all that it starts, beyond what the loaded libraries hold; an episode that
    needs more has failed. Without effect where workers is 0."""
    tool_call_form: str = "auto"
    """Form of the model's tool calls: hermes, qwen3_coder, glm, kimi, kimi_k3, minimax, deepseek, gemma, gpt_oss, seed; auto
    takes the one that the chat template writes."""
    environment_variables: list[str] = []
    """Names of further environment variables that environments, their tools and agents may see; docs/environments.md lists those
    that they always see."""

    @property
    def used(self) -> bool:
        """True when the run has environments."""
        return self.name is not None or bool(self.named)
