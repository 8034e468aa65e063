"""The server of the endpoint: its socket, its shutdown, and idle connections. The sole importer of uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.backends.endpoint.body import framed

MOST_CONNECTIONS = 512
HEAD_S = 20.0  # for the head of a request, from the connection's start or the request's first byte
_LOOK_S = 1.0  # between two checks that the sampler is still running


class Connection(H11Protocol):
    """Closes connections that send no complete request head in time, and new ones while MOST_CONNECTIONS are open."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _look(self) -> None:
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def on_response_complete(self) -> None:
        self._stop()  # between two requests uvicorn closes what is idle
        super().on_response_complete()

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Working(Protocol):
    """The thread behind a server that uses the model."""

    @property
    def failure(self) -> BaseException | None:
        """The error that ended it."""
        ...

    def start(self) -> None: ...

    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...


def serve(app: Any, driver: Working, listener: socket.socket, stopping: threading.Event | None = None) -> None:
    """Answer with an ASGI app until a signal asks to stop (a second one stops at once), ``stopping`` is set, or the driver fails.

    In another thread than the main one, which alone hears signals, no handler is installed.
    """
    stopping = threading.Event() if stopping is None else stopping
    server = uvicorn.Server(
        uvicorn.Config(
            framed(app),
            http=Connection,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=5,
            server_header=False,
        )
    )

    def stop(signal_number: int, frame: object) -> None:
        if server.should_exit:
            raise KeyboardInterrupt
        server.should_exit = True

    heard = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop) for number in heard}
    # In a thread of its own uvicorn installs no signal handlers.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="endpoint", daemon=True)
    driver.start()
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_S)
            if stopping.is_set() or not driver.alive:
                server.should_exit = True
    finally:
        driver.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if driver.failure is not None:
        raise driver.failure


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket. Raises: OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)  # from here on clients may connect; they wait until the server accepts them
    except OSError:
        listener.close()
        raise
    return listener
