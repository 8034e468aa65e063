"""Facts that a registered function, class or engine states about itself, on the line that registers it.

``@POLICY_LOSSES.register("geo_mean", per_response=True)``: the rest of the package asks the registry, which reads the line
without importing the module. What the positional parameters already say (an estimator that takes ``values`` needs a critic)
is no fact of its own. Facts are written as literals.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFacts:
    """Names of this kind have no facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageFacts:
    """Facts about an advantage estimator."""

    compares_responses: bool = False
    """A response is compared with the others to its prompt: with one sample per prompt every advantage is 0."""
    per_response: bool = False
    """The advantage is one number per response, which ``algos.groups.on_tokens`` puts on its tokens; of the mask it reads the
    number of tokens alone."""
    by_rows: bool = False
    """Advantages of a row follow from the row and from numbers over all tokens, by ``records.computed_tensors``: rows that lie in
    other processes are computed there."""
    standardizes_groups: bool = False
    """True when, with normalize_by_std, shifting or scaling a group's rewards leaves its advantages unchanged."""
    aggregation: str = ""
    """The loss.aggregation with which its numbers are the weights that the source defines; "" where any will do."""
    one_update: bool = False
    """Advantages are weights of the policy before the update: a step that makes several would learn from old ones."""
    pairs: bool = False
    """Neighbouring rows of a step are compared: with 3 samples per prompt a pair would be of two prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """Facts about a policy loss."""

    per_response: bool = False
    """The loss is one number per response, so a response has one importance weight: the geometric mean over its tokens."""
    has_ratio: bool = True
    """The loss holds the ratio of the policy to the policy that sampled; False: importance weights are its only correction."""
    chooses_tokens: bool = False
    """Some tokens, chosen over the whole mini-batch by its file's function ``choose``, are treated otherwise: before the update
    where the mini-batch does not come in one piece, by log-probs of one more forward pass."""
    aggregation: str = ""
    """The loss.aggregation that the paper defines the loss with; "" where any will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceFacts:
    """Facts about a divergence of a student from its teacher."""

    of_sampled_tokens: bool = False
    """Reads the log-probs of the sampled tokens alone, [B, T]; False: the distributions over the vocabulary, [N, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """Facts about a built-in reward."""

    quick: bool = False
    """Takes time linear in the length of the response, whatever it says, and calls no library: it may run in the process that
    trains. All other rewards run in workers."""
    queries_server: bool = False
    """Queries a server, from the process that trains, and batches its requests."""
    runs_code: bool = False
    """May run code that a model wrote, so it needs a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineFacts:
    """Facts about a rollout engine."""

    records_experts: bool = False
    """Can record the experts that each token of a mixture of experts was sent to."""
    shares_weights: bool = False
    """Samples from the trainer's own module: there is no second copy of the weights and, on one device, nothing to send."""
    reads_images: bool = False
    """Samples from prompts that hold images."""
    reads_options: bool = True
    """Reads options of its own: rollout.engine_options."""
    reads_sampling: bool = True
    """Reads sampling parameters of its own: rollout.engine_sampling."""
    lacks_options: tuple[str, ...] = ()
    """Options of other engines, under rollout.engine_options, that have no effect in this one."""
    resumes_responses: bool = False
    """Streams hand back unfinished responses and continue them under newer weights (asynchronous.mode colocate)."""
    keeps_cache: bool = False
    """Streams can continue them on the keys and values of older weights (asynchronous.cache_on_new_weights: keep)."""
    seeds_of_requests: bool = False
    """Draws by the seed of a request where it has one."""
    samplings_of_requests: bool = False
    """Draws from the distribution of a request, and ends at its stops, where it has them."""
    reports_top_logprobs: bool = False
    """Reports the likeliest tokens at every place of a response where a request asks for them."""
    prompt_logprobs_of_requests: bool = False
    """Reports the log-probs of a prompt's tokens where a request asks for them."""
    grammars_of_requests: bool = False
    """Keeps a response within the grammar of its request."""
    rounds_weights: bool = False
    """Can multiply by weights that are rounded to eight bits (rollout.weights: int8)."""
    spans_nodes: bool = False
    """The devices of one copy may lie on several nodes."""
    receives_broadcasts: bool = False
    """Every process of a copy can take weights from a broadcast (rollout.weight_sync=collective)."""
    most_temperature: float | None = None
    """Highest temperature that it takes; None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFacts:
    """Facts about an environment."""

    asks: bool = False
    """Asks for turns by itself (an AskingEnv), which takes a process of its own."""
    in_groups: bool = False
    """Plays all episodes of a group in lockstep, in one process."""
    loads: str = ""
    """Function of its settings, "package.module:function", which loads the code of a checkout that they name. It is called before
    a run, in a process that ends with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormFacts:
    """Facts about a form of tool calls."""

    in_template: tuple[str, ...] = ()
    """Texts that are all in the chat templates of models that write it."""
    opening: tuple[str, ...] = ()
    """Texts that a call, or a block of calls, begins with; what stands before is the message's content."""
    marks: tuple[str, ...] = ()
    """Texts of the form that are special tokens in some tokenizers: replies are decoded with them."""
    calls_as_messages: bool = False
    """The chat template takes a turn with calls only as tool_calls of a message, and not as plain text."""
    channels: bool = False
    """A reply has parts between marks, of which one is thoughts; the form's ``said`` splits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerFacts:
    """Facts about a tracker."""

    library: str = ""
    """The optional library that it needs, by its import name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    """Facts about a tool of the environment tools."""

    library: str = ""
    """The optional library that it needs, by its import name."""
    built_once: bool = False
    """Builds something large, which all processes share when a tool with the same options was built before they were forked."""
    files: tuple[str, ...] = ()
    """Options that name a file, which must exist."""
    programs: tuple[str, ...] = ()
    """Options that hold a program and its arguments."""
    variables: tuple[str, ...] = ()
    """Options that name an environment variable, which must be set."""
    own_code: tuple[str, ...] = ()
    """Options that name a class or function of the user's own."""
