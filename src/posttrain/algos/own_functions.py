"""A user's own policy loss, estimator, divergence or tuning method, checked at every call.

An error is one line with the user's own file, line and function, whatever the function does: it raises, returns one number
where one per token is expected, or another shape. A number that is not finite skips the update, as that of a built-in function
does; who returned it is said beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import PosttrainError, Problem, RequestError
from posttrain.records.notices import FROM_OWN_FUNCTIONS
from posttrain.registry import SECTIONS
from posttrain.user_files import defined_at, failed_at, last_line

PER_TOKEN_LOSS = (
    "return the values before mean() or sum(): loss.aggregation makes one number of them, over the whole mini-batch"
)
PER_TOKEN_ADVANTAGE = (
    "one number per response is put on its tokens by torch.where(response_mask, numbers[:, None], 0.0)"
)
MASKS = ("mask", "response_mask")


def checked(function: Callable[..., Any], registry: str, names: Sequence[str]) -> Callable[..., Any]:
    """The function with a check around it.

    Args: registry, the variable of posttrain.registry whose convention it follows; names of its inputs, in order.
    Raises (when called): RequestError.
    """
    check = CHECKS[registry]

    @wraps(function)
    def call(*inputs: Any, **settings: Any) -> Any:
        own = _Call(function, registry, dict(zip(names, inputs, strict=False)))
        try:
            result = function(*inputs, **settings)
        except (Exception, SystemExit) as error:  # a user's function may fail in any way
            if isinstance(error, (PosttrainError, MemoryError)) or "not enough memory" in str(error):
                raise
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise own.failed(error) from error
        return check(result, own)

    return call


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a user's function, and its errors."""

    function: Callable[..., Any]
    registry: str
    inputs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"the {KINDS[self.registry]} {getattr(self.function, '__name__', self.function)}"

    @property
    def place(self) -> str:
        """file:line of the definition."""
        return defined_at(self.function)

    def failed(self, error: BaseException) -> RequestError:
        what = f"{failed_at(error, self.function)}: {self.name} failed: {last_line(error)}"
        tensors = {name: each for name, each in self.inputs.items() if isinstance(each, Tensor)}
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in tensors.items())
        return RequestError(
            Problem(
                what,
                fix=f"it was called with {shapes or 'no tensors: its parameters are its inputs, by their names'}",
                field=f"{SECTIONS[self.registry]}.name",
            )
        )

    def wrong(self, returned: str, fix: str) -> RequestError:
        what = f"{self.place}: {self.name} returned {returned}"
        return RequestError(Problem(what, fix=fix, field=f"{SECTIONS[self.registry]}.name"))

    def tokens(self) -> tuple[int, ...] | None:
        """[B, T]: the shape of the inputs with a number per token; None where it takes none."""
        return next((tuple(each.shape) for each in self.inputs.values() if _is_tensor(each, 2)), None)

    def notice_not_finite(self, values: Tensor) -> None:
        mask = next((self.inputs[name] for name in MASKS if name in self.inputs), None)
        if mask is None:  # values behind a mask that it does not take may be anything
            return
        valid: Any = self.inputs.get("valid")
        mask = mask & valid[:, None] if _is_tensor(valid, 1) else mask
        notice_not_finite(f"{self.place}: {self.name} returned", values, mask, self.inputs.values())


def notice_not_finite(who_returned: str, values: Tensor, mask: Tensor, inputs: Iterable[Any]) -> None:
    """Leave a notice where values [B, T] are not finite within the mask [B, T] bool, and all inputs are."""
    lost = mask & ~values.detach().isfinite().to(mask.device)
    if not lost.any() or not all(_finite(each, mask) for each in inputs):
        return
    row, token = lost.nonzero()[0].tolist()
    what = f"{who_returned} {float(values.detach()[row, token])} for {int(lost.sum())} of {int(mask.sum())} tokens"
    FROM_OWN_FUNCTIONS.add_once(f"{what}, and all of its inputs are finite")


def _loss(result: Any, own: _Call) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss per token and its report; a loss without a report has an empty one."""
    loss, report = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    shape = own.tokens()
    if not isinstance(loss, Tensor) or not isinstance(report, Mapping):
        raise own.wrong(described(result), "return loss, {}: the loss per token, and tensors to log by name")
    if shape is not None and tuple(loss.shape) != shape:
        raise own.wrong(f"{described(loss)}, and a loss is a number per token, {list(shape)}", PER_TOKEN_LOSS)
    own.notice_not_finite(loss)
    return loss, {str(name): _logged(name, each, loss, own) for name, each in report.items()}


def _logged(name: Any, value: Any, loss: Tensor, own: _Call) -> Tensor:
    """A reported value per token; one number stands for all tokens."""
    found = torch.tensor(float(value)) if isinstance(value, int | float) else value
    if not isinstance(found, Tensor) or found.shape not in (loss.shape, torch.Size([])):
        wanted = f"log a tensor {list(loss.shape)}, or one number"
        raise own.wrong(f"{described(value)} to log as {name!r}", wanted)
    return found.to(loss.device).expand(loss.shape)


def _advantages(result: Any, own: _Call) -> Any:
    """Advantages, or these and the returns."""
    shape = own.tokens()
    if shape is None:
        raise own.wrong("advantages of unknown shape: it takes no input with a number per token", "take response_mask")
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) > 2 or not isinstance(parts[0], Tensor) or not all(isinstance(each, Tensor | None) for each in parts):
        raise own.wrong(described(result), "return advantages [B, T], or these and the returns [B, T]")
    for part in parts:
        if part is not None and tuple(part.shape) != shape:
            what = f"{described(part)}, and there is an advantage for every token, {list(shape)}"
            raise own.wrong(what, PER_TOKEN_ADVANTAGE)
    own.notice_not_finite(parts[0])
    return result


def _divergence(result: Any, own: _Call) -> Tensor:
    """A number per token [B, T] or, of distributions [N, V], per position [N]."""
    shape = own.tokens()
    wanted = shape if shape is None or MASKS[0] in own.inputs else shape[:1]
    if not isinstance(result, Tensor) or (wanted is not None and tuple(result.shape) != wanted):
        raise own.wrong(
            f"{described(result)}, and a divergence is a tensor {list(wanted or ())}", "return one per position"
        )
    return result


def _tuning(result: Any, own: _Call) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A loss per pair or row [U], and what to log of each."""
    count = next((len(each) for each in own.inputs.values() if _is_tensor(each, 1)), None)
    losses, report = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(losses, Tensor) or not isinstance(report, Mapping):
        raise own.wrong(described(result), "return losses, {}: the loss per pair or row, and tensors to log by name")
    paired = any(name.startswith("chosen_") for name in own.inputs)
    absent = [name for name in ("rewards/chosen", "rewards/rejected") if paired and name not in report]
    if absent:
        raise own.wrong(
            f"no {' and no '.join(absent)} to log", "return losses, {...} with a number per pair under each"
        )
    for name, value in {"": losses, **report}.items():
        if count is not None and (not isinstance(value, Tensor) or tuple(value.shape) != (count,)):
            what = f"{described(value)}{f' to log as {name!r}' if name else ''}, and there are {count} pairs or rows"
            raise own.wrong(what, "return a number for each; their mean is taken over the whole step")
    return losses, report


KINDS = {
    "ADVANTAGES": "advantage estimator",
    "POLICY_LOSSES": "policy loss",
    "DIVERGENCES": "divergence",
    "TUNE_METHODS": "tuning method",
}
CHECKS: Mapping[str, Callable[[Any, _Call], Any]] = {
    "ADVANTAGES": _advantages,
    "POLICY_LOSSES": _loss,
    "DIVERGENCES": _divergence,
    "TUNE_METHODS": _tuning,
}


def described(value: Any) -> str:
    """A value in an error: a tensor by its shape, a short value as it is written, anything else by its type."""
    if isinstance(value, Tensor):
        return "one number (a tensor of shape [])" if value.ndim == 0 else f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(described(each) for each in value)})"
    if value is None or isinstance(value, int | float | str):
        return repr(value)[:60]
    return type(value).__name__


def _is_tensor(value: Any, dimensions: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == dimensions


def _finite(value: Any, mask: Tensor) -> bool:
    """True where all numbers of the rows and tokens of a mask [B, T] are finite."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    if tuple(value.shape) == tuple(mask.shape):
        return bool(value.detach().isfinite().to(mask.device)[mask].all())
    if tuple(value.shape) == tuple(mask.shape[:1]):
        return bool(value.detach().isfinite().to(mask.device)[mask.any(dim=1)].all())
    return True
