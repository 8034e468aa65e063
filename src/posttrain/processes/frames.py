"""Messages between processes as frames: bytes behind their length, which is checked before anything is read."""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable

_LENGTH = struct.Struct(">I")
MOST_BYTES = (1 << 32) - 1  # that a frame can hold
LOOK_EVERY_S = 0.25  # while the other side is waited for


class FrameTooLong(Exception):
    """A frame announces more bytes than its reader accepts."""


class PipeClosed(Exception):
    """The other side has closed its end, or ended in the middle of a frame."""


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def take_frame(buffer: bytearray, most: int) -> bytes | None:
    """Remove the frame at the start of the buffer and return it; None while it is incomplete. Raises: FrameTooLong."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > most:
        raise FrameTooLong(f"{length} bytes, and {most} are allowed")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    data = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return data


def read_frame(
    fd: int, most: int, timeout_s: float | None = None, *, look: Callable[[], object] | None = None
) -> bytes:
    """Read the next frame, and not a byte of the one behind it.

    Args: look is called every LOOK_EVERY_S of waiting, and ends it by what it raises.
    Raises: PipeClosed, FrameTooLong; TimeoutError.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    poller = select.poll()  # not select(), which knows no descriptor above 1023
    poller.register(fd, select.POLLIN)
    buffer = bytearray()
    while (data := take_frame(buffer, most)) is None:
        _wait(poller, deadline, look)
        whole = _LENGTH.unpack_from(buffer)[0] if len(buffer) >= _LENGTH.size else 0
        got = os.read(fd, min(_LENGTH.size + whole - len(buffer), 1 << 20))
        if not got:
            raise PipeClosed
        buffer += got
    return data


def write_frame(
    fd: int, data: bytes, timeout_s: float | None = None, *, look: Callable[[], object] | None = None
) -> None:
    """Write a frame.

    Args: timeout_s and look, which is called as in ``read_frame``, are for a descriptor that does not block.
    Raises: PipeClosed; TimeoutError when the other side does not read.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    left = memoryview(frame(data))
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BrokenPipeError as error:
            raise PipeClosed from error
        except BlockingIOError:
            _wait(poller, deadline, look)


def _wait(poller: select.poll, deadline: float | None, look: Callable[[], object] | None) -> None:
    """Wait until the descriptor is ready. Raises: TimeoutError; what ``look`` raises."""
    while True:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        pause_s = left_s if look is None else min(LOOK_EVERY_S, LOOK_EVERY_S if left_s is None else left_s)
        if poller.poll(None if pause_s is None else pause_s * 1000):
            return
        if pause_s == left_s:
            raise TimeoutError
        if look is not None:
            look()
