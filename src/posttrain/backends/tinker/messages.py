"""The binary messages of Tinker's clients, in protocol buffers. The sole importer of google.protobuf.

Names and field numbers are those of the package tinker 0.38 (tinker_public), the interface that its clients speak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from posttrain.backends.tinker.requests import Array, Datum, LossRequest, LossResult, Sampled, SampleResult, dense
from posttrain.data.chat_api import Refused

PROTOBUF = "application/x-protobuf"

# Message: number [*] type name, ... ; * is repeated. A map is its repeated entries.
_MESSAGES = """
SampleResponse: 1 *SampledSequence sequences, 2 bytes prompt_logprobs, 3 TopkLogprobs topk_prompt_logprobs
SampledSequence: 1 int32 stop_reason, 2 bytes tokens, 3 bytes logprobs, 4 TopkLogprobs topk_sampled_logprobs
TopkLogprobs: 1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length
SparseCsr: 1 bytes values, 2 bytes crow_indices, 3 bytes col_indices
Tensor: 1 bytes dense, 2 SparseCsr sparse_csr, 3 int32 dtype, 4 *int64 shape
BatchedTensor: 1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 *int64 trailing_shape
ArrayField: 1 string key, 2 BatchedTensor value
ArrayRecord: 1 string type_tag, 2 *ArrayField fields, 3 int64 num_datums
Metric: 1 string key, 2 double value
ForwardBackwardOutput: 1 string loss_fn_output_type, 2 *ArrayRecord loss_fn_outputs, 3 *Metric metrics
ConfigValue: 1 double number, 2 string text
ConfigEntry: 1 string key, 2 ConfigValue value
ForwardBackwardRequest: 1 string model_id, 2 int32 seq_id, 3 *Datum data, 4 string loss_fn, 5 *Metric loss_fn_config, \
6 bool forward_only, 7 *ConfigEntry loss_fn_config_v2
LossInput: 1 string key, 2 Tensor value
Datum: 1 *Chunk model_input, 2 *LossInput loss_fn_inputs
Chunk: 1 EncodedTextChunk encoded_text, 2 bytes image, 3 bytes dmel
EncodedTextChunk: 1 bytes tokens
"""
_FLOAT32, _INT64, _INT32 = 1, 2, 3  # DType
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
_STOP_REASONS = {"stop": 0, "length": 1}


@cache
def _classes() -> dict[str, Any]:
    """Build a class per message."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="posttrain_tinker.proto", package="posttrain_tinker", syntax="proto2"
    )
    for line in _MESSAGES.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            number, kind, called = field.split()
            repeated, kind = kind.startswith("*"), kind.removeprefix("*")
            added = message.field.add(name=called, number=int(number))
            added.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind[0].isupper():
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".posttrain_tinker.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"posttrain_tinker.{message.name}"))
        for message in file.message_type
    }


def read_loss_request(body: bytes) -> LossRequest:
    """Read a request of forward or forward_backward. Raises: Refused."""
    message = _classes()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"the body is not a ForwardBackwardRequest: {error}") from None
    config: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        config[entry.key] = entry.value.text if entry.value.HasField("text") else entry.value.number
    return LossRequest(
        model_id=message.model_id,
        seq_id=message.seq_id if message.HasField("seq_id") else None,
        data=tuple(_datum(number, datum) for number, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
    )


def _datum(number: int, message: Any) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise Refused(f"data[{number}] holds an image or audio, and this server trains on text")
        tokens += _array(chunk.encoded_text.tokens, _DTYPES[_INT32], f"data[{number}].model_input").tolist()
    inputs = {
        entry.key: _tensor(entry.value, f"data[{number}].loss_fn_inputs.{entry.key}")
        for entry in message.loss_fn_inputs
    }
    return Datum(token_ids=tuple(tokens), inputs=inputs)


def _array(content: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(content) % dtype.itemsize:
        raise Refused(f"{where} has {len(content)} bytes, which are no whole number of {dtype.name}")
    return np.frombuffer(content, dtype=dtype)


def _tensor(message: Any, where: str) -> Array:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise Refused(f"{where} has an unknown type of numbers ({message.dtype}); send float32 or int64")
    shape = tuple(message.shape)
    if message.HasField("sparse_csr"):
        sparse, index = message.sparse_csr, _DTYPES[_INT64]
        rows, columns = (_array(each, index, where) for each in (sparse.crow_indices, sparse.col_indices))
        return dense(_array(sparse.values, dtype, where), rows, columns, shape, where)
    values = _array(message.dense, dtype, where)
    if shape and (min(shape) < 0 or math.prod(shape) != values.size):
        raise Refused(f"{where} has {values.size} numbers and the shape {list(shape)}")
    return values.reshape(shape) if shape else values


def loss_result(result: LossResult) -> bytes:
    """Write the result of forward or forward_backward."""
    message = _classes()["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for key, value in result.metrics.items():
        message.metrics.add(key=key, value=value)
    # Fields of one record share their trailing shape: neighbours with another one begin a new record.
    start = 0
    outputs = result.logprobs
    while start < len(outputs):
        end = start
        while end < len(outputs) and outputs[end].shape[1:] == outputs[start].shape[1:]:
            end += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - start)
        pieces = [np.ascontiguousarray(each, dtype="<f4").tobytes() for each in outputs[start:end]]
        field = record.fields.add(key="logprobs").value
        field.dtype, field.data = _FLOAT32, b"".join(pieces)
        field.offsets = np.cumsum([0, *map(len, pieces)], dtype="<i8").tobytes()
        field.trailing_shape.extend(outputs[start].shape[1:])
        start = end
    return bytes(message.SerializeToString())


def sample_result(result: SampleResult) -> bytes:
    """Write the result of a sampling request."""
    message = _classes()["SampleResponse"]()
    for each in result.sequences:
        _add_sequence(message, each)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(np.nan if each is None else each for each in result.prompt_logprobs)
    if result.top_prompt is not None:
        _fill_top(message.topk_prompt_logprobs, result.top_prompt)
    return bytes(message.SerializeToString())


def _add_sequence(message: Any, sampled: Sampled) -> None:
    sequence = message.sequences.add(stop_reason=_STOP_REASONS[sampled.stop_reason])
    sequence.tokens = np.array(sampled.tokens, dtype="<i4").tobytes()
    sequence.logprobs = _floats(sampled.logprobs)
    if sampled.top is not None:
        _fill_top(sequence.topk_sampled_logprobs, sampled.top)


def _fill_top(message: Any, top: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    """Write the top tokens of every position; a position without any has the token 0 and the log-prob -99999, by which clients
    know it."""
    k = max((len(each) for each in top if each is not None), default=0)
    rows = [each if each is not None else [(0, -99999.0)] * k for each in top]
    message.k, message.length = k, len(rows)
    message.token_ids = np.array([token for row in rows for token, _ in row], dtype="<i4").tobytes()
    message.logprobs = _floats(value for row in rows for _, value in row)


def _floats(values: Any) -> bytes:
    return np.array(list(values), dtype="<f4").tobytes()
