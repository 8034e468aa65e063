"""Settings of the scoring of responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from posttrain.config.algorithm import KlEstimator
from posttrain.config.base import Section
from posttrain.config.judge import JUDGE, JudgeConfig
from posttrain.config.model import ModelName
from posttrain.config.policy import ONE_DEVICE
from posttrain.config.process_reward import ProcessRewardConfig
from posttrain.config.served_model import ServedModelConfig

Normalization = Literal["none", "group", "batch", "running"]


class RewardTerm(Section):
    name: str
    """A built-in reward (docs/rewards.md lists them), or, with path, the name of your function in that file."""
    path: str | None = None
    """Python file, or pkg://package.module, that holds the function called name; null means a built-in reward."""
    weight: float = 1.0
    """Factor of this term in the sum that is the reward."""
    options: dict[str, Any] = {}
    """Keyword arguments for the reward."""
    batched: bool = False
    """Your function is called once for all responses of a step, with lists: data_sources, solution_strs, ground_truths,
    extra_infos; it returns a list."""
    halve_failed_batch: bool = True
    """Repeat a failed batched call on halves of the responses, until only responses that fail alone are without a reward; false
    is for a function whose values depend on the whole batch."""
    returns: Literal["number", "first"] = "number"
    """Form of your function's result: a number or a mapping with one under "score"; or first, where a tuple or a list stands for
    its first entry, which verl's reward manager prime reads."""
    extra_info: dict[str, Any] = {}
    """Entries that your function gets in extra_info besides those of the row."""
    judge_tokenizer: str | None = None
    """Folder or hub id of the model of a judge that your function asks by its address: the function gets the model's tokenizer
    as reward_model_tokenizer, as from verl, where it takes that."""
    reads: Literal["response", "sequence"] = "response"
    """The text your function gets: the response, without special tokens; or sequence, the prompt and the response in one text
    with all special tokens, which verl 0.1 and 0.2 pass to reward functions."""
    kind: Literal["function", "manager", "program"] = "function"
    """Kind of the name in the file of path: a function; or a reward manager written for verl, a class that is defined or
    registered there under that name and called with the token ids of all responses of a step (docs/own-classes.md); or program:
    path is the main program of a fork of verl, and the object of that class which it passes to its trainer as reward_fn is made
    by the program's own statements, with options as its config, and called as a manager."""
    scores_with: str | None = None
    """Function that a manager gets as compute_score, path/to/file.py:function; null means the built-in scorers by data source."""
    scores_with_options: dict[str, Any] = {}
    """Keyword arguments of that function."""
    own_score: bool = False
    """Give None for compute_score to a manager without scores_with whose constructor allows it, as verl 0.1 to 0.3 do, so that
    its own default scores; false gives it the built-in scorers by data source, as verl does from 0.4 on."""
    data_sources: list[str] = []
    """The term counts for prompts of these data sources only; empty means all."""


class RewardModelConfig(Section):
    """A sequence classification model that scores whole responses."""

    path: ModelName
    """Folder or hub id of a sequence or token classification model with one label."""
    weight: float = 1.0
    """Factor of its score in the reward."""
    own_template: bool = False
    """Decode the conversation and write it again with the reward model's own tokenizer and chat template; false gives it
    the policy's token ids, which needs the same tokenizer."""
    sequences_per_micro_batch_per_device: int = Field(default=16, ge=1)
    """Sequences per forward pass."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longer conversations are cut before they are scored; null does not cut."""
    truncation: Literal["left", "right", "middle", "error"] = "left"
    """The end at which they are cut; middle keeps both ends, and error scores none of them: they are without a reward."""
    trust_remote_code: bool = False
    """Allow code from the model's folder to run."""
    config_overrides: dict[str, Any] = {}
    """Fields of the model's config.json with other values."""
    engine: str = ONE_DEVICE
    """Engine that computes it: local has all of the model on every device; fsdp shares out the weights over its devices, which
    gather them layer by layer."""
    engine_options: dict[str, Any] = {}
    """Options of fsdp in its own words, as of policy.engine_options; local reads none."""
    offload: bool = False
    """Keep the weights in CPU memory but while responses are scored."""
    devices: list[int] | None = None
    """Devices of the reward model, by number; null means all."""


# Endings of the names of transformers' classes with a score head.
CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")


class KlRewardConfig(Section):
    """A KL penalty on every token, as a part of the reward."""

    coef: float = Field(default=0.0, ge=0.0)
    """Weight of the penalty at the start; 0 has none."""
    estimator: KlEstimator = "k1"
    """Estimator of the KL between the policy that sampled and the reference."""
    target: float | None = Field(default=None, gt=0.0)
    """Steer the weight towards this KL, nats per token; null keeps the weight."""
    horizon_sequences: int = Field(default=10_000, ge=1)
    """Number of sequences over which the weight is adapted: larger values adapt more slowly."""


class RewardConfig(Section):
    terms: list[RewardTerm] = [RewardTerm(name="exact_match")]
    """Reward terms; a response's reward is their weighted sum."""
    model: RewardModelConfig | None = None
    """A reward model, whose score is added to the terms; null has none."""
    judge: JudgeConfig | None = None
    """A language model of the run that grades responses, whose verdict is added to the terms; null has none."""
    more_judges: dict[str, JudgeConfig] = {}
    """Further judges, each with a model and data sources of its own, by the names under which their verdicts are kept."""
    served: ServedModelConfig | None = None
    """A language model that the run serves for functions of the terms, which ask it at an address; null has none."""
    process: ProcessRewardConfig | None = None
    """A model that is trained during the run to reward tokens, for the advantage prime; null has none."""
    check_references: bool = True
    """Before the first step, score the reference answers of a few prompts beside wrong ones and warn when the reward prefers the
    wrong ones or finds no right one. Not done with rewards that ask a server, or with a reward model."""
    workers: int | None = Field(default=None, ge=1, le=10_000)
    """Processes that score; null means one per core, at most 4."""
    timeout_s: float = Field(default=10.0, gt=0.0, le=1e7)
    """Time that scoring one response may take (one call, where a term is batched), and CPU time of all its processes; time for
    which boxes of model-written code wait for a core does not count. A response that takes longer is without a reward."""
    memory_gib: float = Field(default=2.0, gt=0.0)
    """Memory that scoring one response may take, beyond what the loaded functions hold."""
    environment_variables: list[str] = []
    """Names of further environment variables that the processes which score may see; docs/rewards.md lists those that they
    always see."""
    max_invalid_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of responses in one step that may be without a valid reward before the run stops."""
    overrun_is_zero: bool = False
    """A response on which math_verify or math_rule exceeds timeout_s or memory_gib gets 0 from that term, when a plain answer to
    the same prompt can be scored; false makes it invalid, so that it leaves the gradient. ROLL scores 0."""
    allow_unboxed_code: bool = False
    """Run model-written code also where this machine cannot box it in: it can then read and write this user's files, use the
    network and signal this user's processes; only limits of time, memory and output hold. Has no effect where a box can be
    made. Without it such a run is refused."""
    overlong_buffer_tokens: int | None = Field(default=None, ge=1)
    """Responses that reach into the last so many of max_response_tokens lose reward, linearly; null has no such rule."""
    overlong_penalty: float = Field(default=1.0, ge=0.0)
    """Reward lost by a response that fills the whole buffer."""
    zero_unless_stopped: bool = False
    """The reward of a response that did not end by itself is 0."""
    by_turn: bool = True
    """Place the environment's reward of a turn on that turn's last token; false places an episode's whole reward on its last
    token. Only estimators that use token rewards differ (gae, reinforce, agentic_reinforce and others)."""
    normalize_mean: Normalization = "none"
    """Subtract the mean reward of the group, of the step, or of the run so far."""
    normalize_std: Normalization = "none"
    """Divide by the standard deviation of the group, of the step, or of the run so far."""
    clip: float | None = Field(default=None, gt=0.0)
    """Rewards are cut to plus or minus this, after normalisation; null does not cut."""
    clip_tokens: float | None = Field(default=None, gt=0.0)
    """Rewards of tokens are cut to plus or minus this, after the KL; null does not cut."""
    kl: KlRewardConfig = KlRewardConfig()
    """KL penalty inside the reward."""

    @property
    def judges(self) -> dict[str, JudgeConfig]:
        """The judges, by the names of their verdicts."""
        first = {} if self.judge is None else {JUDGE: self.judge}
        return first | self.more_judges
