"""What crosses between processes: JSON behind its length. Values that JSON has no form for are tagged."""

from __future__ import annotations

import base64
import json
import os
import select
import struct
import time
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

_LENGTH = struct.Struct(">I")
_TAG = "~"  # {"~": kind, "of": value}

_KINDS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    Decimal: ("decimal", str),
    datetime: ("datetime", datetime.isoformat),
    date: ("date", date.isoformat),
    time_of_day: ("time", time_of_day.isoformat),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    tuple: ("tuple", lambda value: [_plain(item) for item in value]),
    set: ("set", lambda value: [_plain(item) for item in value]),
}
_BACK: dict[str, Callable[[Any], Any]] = {
    "bytes": base64.b64decode,
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time_of_day.fromisoformat,
    "timedelta": lambda value: timedelta(*value),
    "tuple": tuple,
    "set": set,
    "items": dict,
}


class TooLong(Exception):
    """A frame says that it is longer than its reader accepts."""


class Ended(Exception):
    """The other side has closed, or ended in the middle of a frame."""


def to_bytes(value: Any) -> bytes:
    """Raises: TypeError for a value of a kind that datasets do not hold; ValueError for an integer of thousands of digits."""
    return json.dumps(_plain(value)).encode()


def from_bytes(data: bytes) -> Any:
    """What ``to_bytes`` was given. Raises: ValueError for anything that it does not write."""
    try:
        return json.loads(data, object_hook=_restored)
    except (RecursionError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not what a worker writes: {type(error).__name__}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {_TAG: "items", "of": [[_plain(key), _plain(item)] for key, item in value.items()]}
    for kind, (name, write) in _KINDS.items():
        if type(value) is kind:
            return {_TAG: name, "of": write(value)}
    if hasattr(value, "tolist"):  # a NumPy array or number
        return _plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be handed to another process")


def _restored(value: dict[str, Any]) -> Any:
    return _BACK[value[_TAG]](value["of"]) if _TAG in value else value


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def take_frame(buffer: bytearray, most: int) -> bytes | None:
    """The frame at the start of the buffer, which is taken out; None when it is not whole yet. Raises: TooLong."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > most:
        raise TooLong(f"{length} bytes, and {most} are allowed")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    data = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return data


def read_frame(fd: int, most: int, timeout_s: float | None = None) -> bytes:
    """The next frame. Raises: Ended, TooLong; TimeoutError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    poller = select.poll()  # not select(), which knows no descriptor above 1023
    poller.register(fd, select.POLLIN)
    buffer = bytearray()
    while (data := take_frame(buffer, most)) is None:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if left is not None and not poller.poll(left * 1000):
            raise TimeoutError
        whole = _LENGTH.unpack_from(buffer)[0] if len(buffer) >= _LENGTH.size else 0
        got = os.read(fd, min(_LENGTH.size + whole - len(buffer), 1 << 20))  # not a byte of the frame behind it
        if not got:
            raise Ended
        buffer += got
    return data


def write_frame(fd: int, data: bytes, timeout_s: float | None = None) -> None:
    """Args: ``timeout_s`` is for a descriptor that does not block. Raises: Ended; TimeoutError when nobody reads."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    left = memoryview(frame(data))
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BrokenPipeError as error:
            raise Ended from error
        except BlockingIOError:
            if not poller.poll(None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000):
                raise TimeoutError from None
