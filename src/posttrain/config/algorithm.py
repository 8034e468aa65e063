"""The advantage estimator and the policy loss of a run, with their settings; KL and rollout correction.

The fields below are common to all estimators and losses. The settings of one are the keyword-only parameters of its function
(``registry.ADVANTAGES``, ``registry.POLICY_LOSSES``): further keys of the same section, checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import CoreSchema, ErrorType

from posttrain.config.base import Section
from posttrain.descriptions import Description
from posttrain.errors import RequestError
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, Registry

KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"]
Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "prompt_mean",
]


class AlgorithmSection(Section):
    """A registered function by its name, or the user's own in a file; further keys are settings."""

    model_config = ConfigDict(extra="allow")
    registry: ClassVar[Registry[Any]]

    name: str
    """A built-in one, or, with path, the name of your function in that file."""
    path: str | None = None
    """Python file, or pkg://package.module, that holds the function called name; null means a built-in one."""

    @model_validator(mode="before")
    @classmethod
    def _check_settings(cls, values: Any) -> Any:
        """Check further keys as settings of the chosen function, and fill in its defaults. Settings of other functions stay where
        they differ from their default: ``plan`` reports that they have no effect."""
        if not isinstance(values, Mapping):
            return values
        name, path = values.get("name", cls.model_fields["name"].default), values.get("path")
        if not isinstance(name, str) or not isinstance(path, str | None):
            return {key: value for key, value in values.items() if key in cls.model_fields}
        try:
            own = cls.registry.describe(name, path).settings
        except RequestError:
            own = None
        kept: dict[str, Any] = {}
        errors: list[InitErrorDetails] = []
        for key, value in values.items():
            if key in cls.model_fields:
                kept[key] = value
                continue
            known = own or {}
            setting = known.get(key) or cls.registry.all_settings().get(key)
            if setting is None:
                if own is None:  # reported by the name
                    kept[key] = value
                else:
                    unknown = PydanticCustomError(
                        "unknown_setting", "unknown setting", {"known": [*cls.model_fields, *own]}
                    )
                    errors.append(InitErrorDetails(type=unknown, loc=(key,), input=value))
            elif setting.required and value is None:
                continue
            else:
                try:
                    checked = setting.checked(value)
                except ValidationError as error:
                    errors += [_at(key, each) for each in error.errors(include_url=False)]
                else:
                    if key in known or not setting.is_default(checked):
                        kept[key] = checked
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        defaults = {key: each.default for key, each in (own or {}).items() if not each.required}
        return {**defaults, **kept}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema with the settings of all built-in functions; further keys only with ``path``, which names the user's own."""
        schema = handler.resolve_ref_schema(super().__get_pydantic_json_schema__(core_schema, handler))
        for key, setting in cls.registry.all_settings().items():
            annotation: Any = Annotated[setting.type, setting.field()]
            described = TypeAdapter[Any](annotation).json_schema()
            schema["properties"][key] = {"title": key.replace("_", " ").title(), **described}
        schema.pop("additionalProperties", None)
        schema["if"], schema["then"] = {"required": ["path"]}, {"additionalProperties": True}
        schema["unevaluatedProperties"] = False
        return schema

    @property
    def about(self) -> Description[Any]:
        """Inputs, settings and facts of the chosen function; an empty description for an unknown one."""
        return self.registry.known(self.name, self.path)

    @property
    def is_known(self) -> bool:
        """False for a name or file that is not there."""
        try:
            self.registry.describe(self.name, self.path)
        except RequestError:
            return False
        return True

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the chosen function, by name."""
        more = self.model_extra or {}
        return {key: more[key] for key in self.about.settings if key in more}

    @property
    def unread(self) -> dict[str, Any]:
        """Settings of other functions that are given and differ from their default."""
        own = self.about.settings
        return {key: value for key, value in (self.model_extra or {}).items() if key not in own}


def _at(key: str, error: ErrorDetails) -> InitErrorDetails:
    """The same error, of a setting."""
    place = (key, *error["loc"])
    if error["type"] in get_args(ErrorType):
        return InitErrorDetails(type=error["type"], loc=place, input=error["input"], ctx=error.get("ctx", {}))
    # The error comes from the user's own annotation.
    kind = PydanticCustomError("setting", "{message}", {"message": error["msg"]})
    return InitErrorDetails(type=kind, loc=place, input=error["input"])


class AdvantageConfig(AlgorithmSection):
    registry: ClassVar[Registry[Any]] = ADVANTAGES

    name: str = "grpo"
    """Advantage estimator: a built-in one, or, with path, the name of your function in that file."""
    whiten_rewards: bool = False
    """Bring the step's token rewards to mean 0 and variance 1 before the estimator sees them."""
    whiten: bool = False
    """Bring the step's advantages to mean 0 and variance 1 over all loss tokens (estimators that do so anyway: no change)."""
    clip: float | None = Field(default=None, gt=0.0)
    """Advantages are cut to plus or minus this, after whitening; null does not cut."""


class RolloutCorrectionConfig(Section):
    """Correction of the gap between the log-probs of the sampler and those of the trainer."""

    weights: Literal["none", "token", "sequence", "sequence_mean", "turn"] = "none"
    """Multiply token losses by pi_old / pi_rollout: per token, its product over the response (sequence), or its geometric mean
    over the response (sequence_mean) or over the tokens that were sampled without a break (turn); none does not."""
    weight_high: float = Field(default=2.0, gt=0.0)
    """Weights are cut to this (truncated importance sampling)."""
    weight_low: float | None = Field(default=None, gt=0.0)
    """If set, weights outside [weight_low, weight_high] become 0 instead of being cut (IcePop)."""
    normalize: bool = False
    """Divide the weights by their mean over the step."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Log-probs of the policy at the start of the step, which the weights compare with the sampler's: recompute, by a forward
    pass; or loglinear, interpolated in the update between the sampler's and the current ones by the versions of the
    weights, without that pass (AReaL's prox_logp_method): exact in the first update of a step, approximate in the others."""
    reject: list[str] = []
    """Rules that take tokens or responses out of the loss: token_k1, token_k2, token_k3, or sequence_sum_, sequence_mean_,
    sequence_max_, turn_mean_ with k1, k2, k3 or difference behind (of probabilities, trainer less sampler); step_m2 takes the
    tokens with the largest squared log-ratio out, until the mean square of the step's others is within its bound (M2PO, 0.04
    there)."""
    reject_bounds: list[str] = []
    """One bound for all rules or one for each: an upper bound, or for k1 and difference lower_upper, such as 0.5_2."""
    use_rollout_logprobs: bool = False
    """Take the sampler's log-probs as the old ones: the ratio corrects the gap itself, and without weights or rules there is
    no forward pass for old log-probs."""


class LossConfig(AlgorithmSection):
    registry: ClassVar[Registry[Any]] = POLICY_LOSSES

    name: str = "ppo_clip"
    """Policy loss: a built-in one, or, with path, the name of your function in that file."""
    aggregation: Aggregation = "token_mean"
    """Aggregation of the token losses over the whole mini-batch."""
    entropy_aggregation: Aggregation = "token_mean"
    """Aggregation of the entropy: the mean over tokens by default, as in SkyRL and TRL, so that entropy_coef means the same
    with every aggregation of the losses. verl and ROLL use that of the policy loss, and their files set it."""
    norm_tokens: int | None = Field(default=None, ge=1)
    """sequence_mean_token_sum_norm: the sum of a response's token losses is divided by this; null means
    rollout.max_response_tokens."""
    mask_truncated: bool = False
    """Leave responses that were cut at max_response_tokens out of the loss; their rewards still count in the baseline."""
    mask_long_wrong_tokens: int | None = Field(default=None, ge=1)
    """Leave responses of at least so many sampled tokens whose score is not above 0 out of the loss; null leaves none out."""
    weigh_by: list[Literal["difficulty", "length"]] = []
    """Multiply the policy loss of responses by weights whose mean over the step is 1: by difficulty 0.5 + 1.5 x the row's extra
    column difficulty (0 to 1), by length from 1.5 for the shortest response of the step to 0.5 for the longest."""
    policy_coef: float = Field(default=1.0, ge=0.0)
    """Weight of the policy loss beside the terms below, which have their own."""
    topr_coef: float = Field(default=0.0, ge=0.0)
    """Weight of a further loss on the responses whose score is not above 0: -min(pi / pi_old, 1) x advantage x log pi, with the
    ratio held constant."""
    sft_coef: float = Field(default=0.0, ge=0.0)
    """Weight of a supervised term besides the loss: -score x log pi on the responses with a score above 0."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    router_balance_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the loss that spreads tokens evenly over the experts of a layer (arXiv:2101.03961); for mixtures of experts. A
    pass over the mini-batch counts tokens first, so that micro-batches change nothing."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference in the loss; 0 loads no reference model."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL; with + it has the gradient of k2, which is the KL's."""
    kl_aggregation: Aggregation | None = None
    """Aggregation of that KL; null means that of the policy loss."""
    kl_importance_weighted: bool = False
    """Multiply every token's estimate by the policy's ratio to the one that sampled: unbiased in value and gradient after
    updates as well (DeepSeek-V3.2; TRL's use_bias_correction_kl)."""
    off_policy_limit: float | None = Field(default=None, gt=0.0)
    """Leave tokens with a negative advantage out of the policy loss where the response's mean of sampler's less policy's
    log-prob is above this, in nats (DeepSeek-V3.2; TRL's off_policy_mask_threshold); null leaves none out."""
    high_entropy_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Only this share of a mini-batch's tokens, those with the highest entropy before the step's first update, enter the policy
    loss (arXiv:2506.01939; TRL's top_entropy_quantile); the step is scored once more for it. null: all tokens do."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Correction for the gap between sampler and trainer."""

    @property
    def compares_with_sampler(self) -> bool:
        """True when the ratio of the loss is to the policy that sampled, with the sampler's log-probs."""
        about, by_setting = self.about, self.rollout_correction.use_rollout_logprobs
        replaced = by_setting and about.facts.has_ratio and "old_logprobs" in about.inputs
        return replaced or "rollout_logprobs" in about.inputs

    @property
    def corrects_for_sampler(self) -> bool:
        """True when the loss compares the policy with the one that sampled each token, by its ratio or by weights."""
        return self.rollout_correction.weights != "none" or self.compares_with_sampler
