"""Requests of Tinker's clients and their results, as records, and the JSON form of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.data.chat_api import Refused

Array = NDArray[Any]
_LARGEST = 1 << 62  # number in a request
_MOST_SAMPLES = 1024  # per request
_MOST_ENTRIES = 1 << 28  # of a sparse tensor in full
Top = Sequence[Sequence[tuple[int, float]] | None]  # per position: tokens and log-probs, most likely first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One sequence of N tokens, and what the loss needs at each of them."""

    token_ids: tuple[int, ...]  # the input: position i predicts target i
    inputs: Mapping[str, Array]  # by name, [N] or [N, K]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossRequest:
    """A request of forward or forward_backward."""

    model_id: str
    seq_id: int | None
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """Log-probs of the targets, nats, per datum in the shape of its targets; and metrics, named NAME:REDUCTION."""

    logprobs: tuple[Array, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for responses to one prompt."""

    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignores_end: bool  # stop=[]: no token ends a response
    seed: int | None
    prompt_logprobs: bool
    last_prompt_logprobs: int | None  # of how many of the prompt's tokens; None: of all
    top_prompt: int  # log-probs per position of the prompt
    top_sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str  # stop or length
    top: Top | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    sequences: tuple[Sampled, ...]
    prompt_logprobs: Sequence[float | None] | None = None
    top_prompt: Top | None = None


def text(body: Mapping[str, Any], name: str) -> str:
    """Return a parameter that is a text. Raises: Refused."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(f"{name} is missing, or no text")
    return value


def number(
    body: Mapping[str, Any], name: str, default: Any, *, kind: type = int, least: float = 0, above: bool = False
) -> Any:
    """Return a parameter that is a number. Raises: Refused."""
    value = body.get(name)
    if value is None:
        return default
    right = isinstance(value, int | float) and not isinstance(value, bool) and (kind is float or isinstance(value, int))
    if not right or not least <= value <= _LARGEST or (above and value == least):
        raise Refused(f"{name}={value!r} is no {'number' if kind is float else 'whole number'} of at least {least:g}")
    return kind(value)


def tokens_of(chunks: Any, where: str) -> tuple[int, ...]:
    """Return the token ids of a model input in JSON. Raises: Refused."""
    chunks = chunks.get("chunks") if isinstance(chunks, Mapping) else chunks
    if not isinstance(chunks, list):
        raise Refused(f"{where} has no list of chunks")
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, Mapping) else None
        if kind != "encoded_text":
            raise Refused(f"{where} holds a chunk of type {kind}, and this server reads text alone (encoded_text)")
        found = chunk.get("tokens")
        if not isinstance(found, list) or not all(type(each) is int for each in found):
            raise Refused(f"{where} holds tokens that are no whole numbers")
        tokens += found
    return tuple(tokens)


def read_sample_request(body: Mapping[str, Any]) -> SampleRequest:
    """Read a sampling request. Raises: Refused, also for parameters that this server does not have."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if body.get(name):
            raise Refused(f"{name} is not supported by this server")
    if body.get("record_stability_info"):
        what = "record_stability_info is for the loss stable_reinforce, which this server does not have"
        raise Refused(f"{what}: use another loss (rl_loop of tinker-cookbook: loss_fn=importance_sampling)")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise Refused("sampling_params is no mapping")
    stop, texts, ids = sampling.get("stop"), [], []
    for each in [stop] if isinstance(stop, str) else stop or []:
        if isinstance(each, str) and each:
            texts.append(each)
        elif type(each) is int:
            ids.append(each)
        else:
            raise Refused(f"stop holds {each!r}, which is neither a text nor a token id")
    top_k = sampling.get("top_k")
    last = number(body, "prompt_logprobs_last_n", None, least=1)
    prompt = tokens_of(body.get("prompt"), "prompt")
    if last is not None and not (body.get("prompt_logprobs") and last < len(prompt)):
        raise Refused(f"prompt_logprobs_last_n={last} needs prompt_logprobs, and a prompt of more than {last} tokens")
    top_p = number(sampling, "top_p", 1.0, kind=float, above=True)
    if top_p > 1:
        raise Refused(f"top_p={top_p:g} is above 1")
    samples = number(body, "num_samples", 1, least=1)
    if samples > _MOST_SAMPLES:
        raise Refused(f"num_samples={samples} is above {_MOST_SAMPLES}: send several requests")
    return SampleRequest(
        prompt=prompt,
        num_samples=samples,
        max_tokens=number(sampling, "max_tokens", None, least=1),
        temperature=number(sampling, "temperature", 1.0, kind=float),
        top_k=0 if top_k is None else max(0, number(sampling, "top_k", -1, least=-1)),
        top_p=top_p,
        stop=tuple(texts),
        stop_token_ids=tuple(ids),
        ignores_end=isinstance(stop, list) and not stop,
        seed=number(sampling, "seed", None),
        prompt_logprobs=bool(body.get("prompt_logprobs")),
        last_prompt_logprobs=last,
        top_prompt=number(body, "topk_prompt_logprobs", 0),
        top_sampled=number(body, "topk_sample_logprobs", 0),
    )


def read_loss_request_json(body: Mapping[str, Any], *, forward_only: bool) -> LossRequest:
    """Read the JSON form of a request of forward or forward_backward. Raises: Refused."""
    wanted = body.get("forward_input" if forward_only else "forward_backward_input")
    if not isinstance(wanted, Mapping) or not isinstance(wanted.get("data"), list):
        raise Refused("the body has no data")
    config = wanted.get("loss_fn_config") or {}
    if not isinstance(config, Mapping) or not all(isinstance(each, int | float | str) for each in config.values()):
        raise Refused("loss_fn_config holds values that are neither numbers nor texts")
    data = []
    for place, datum in enumerate(wanted["data"]):
        where = f"data[{place}]"
        if not isinstance(datum, Mapping) or not isinstance(datum.get("loss_fn_inputs", {}), Mapping):
            raise Refused(f"{where} is no datum")
        inputs = {
            name: _tensor(value, f"{where}.loss_fn_inputs.{name}")
            for name, value in datum.get("loss_fn_inputs", {}).items()
        }
        data.append(Datum(token_ids=tokens_of(datum.get("model_input"), f"{where}.model_input"), inputs=inputs))
    return LossRequest(
        model_id=text(body, "model_id"),
        seq_id=number(body, "seq_id", None),
        data=tuple(data),
        loss_fn=text(wanted, "loss_fn"),
        config=dict(config),
        forward_only=forward_only,
    )


def _tensor(value: Any, where: str) -> Array:
    if not isinstance(value, Mapping) or value.get("dtype") not in ("float32", "int64"):
        raise Refused(f"{where} is no tensor of float32 or int64")
    try:
        found = np.asarray(value.get("data", []), dtype=value["dtype"])
        shape = value.get("shape")
        if value.get("sparse_crow_indices") is not None:
            rows, columns = (np.asarray(value.get(f"sparse_{side}_indices"), dtype="int64") for side in ("crow", "col"))
            return dense(found, rows, columns, tuple(shape or ()), where)
        return found.reshape(shape) if shape is not None else found
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(f"{where} cannot be read: {error}") from None


def dense(values: Array, crow: Array, columns: Array, shape: tuple[int, ...], where: str) -> Array:
    """Return a sparse tensor (compressed rows) in full, 0 where it holds nothing. Raises: Refused."""
    fits = len(shape) == 2 and min(shape) >= 0 and len(crow) == shape[0] + 1 and len(values) == len(columns)
    fits = (
        fits
        and shape[0] * shape[1] <= _MOST_ENTRIES
        and crow[0] == 0
        and crow[-1] == len(values)
        and bool((np.diff(crow) >= 0).all())
    )
    if not fits or (len(columns) and not (columns.min() >= 0 and columns.max() < shape[1])):
        raise Refused(f"{where} is no sparse tensor of the shape {list(shape)}")
    found = np.zeros(shape, dtype=values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(crow)), columns] = values
    return found


def loss_result_json(result: LossResult) -> dict[str, Any]:
    """Return the JSON form of a result of forward or forward_backward."""
    outputs = [
        {"logprobs": {"data": each.ravel().tolist(), "dtype": "float32", "shape": list(each.shape)}}
        for each in result.logprobs
    ]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(result.metrics)}


def sample_result_json(result: SampleResult) -> dict[str, Any]:
    """Return the JSON form of a result of sampling."""
    return {
        "type": "sample",
        "sequences": [
            {
                "tokens": list(each.tokens),
                "logprobs": list(each.logprobs),
                "stop_reason": each.stop_reason,
                **({} if each.top is None else {"topk_logprobs": each.top}),
            }
            for each in result.sequences
        ],
        "prompt_logprobs": result.prompt_logprobs,
        "topk_prompt_logprobs": result.top_prompt,
    }
