"""An address on this machine that stands for several servers: each connection goes to the one that has fewest open, and among
those to the one that was given fewest."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

_CHUNK = 1 << 16
_WAITING = 1024  # connections that may wait until the servers are known


class TcpRelay:
    """Listens on loopback from the start; connections wait until ``lead_to`` names the servers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_WAITING)
        self._targets: tuple[tuple[str, int], ...] = ()
        self._open = Counter[tuple[str, int]]()
        self._given = Counter[tuple[str, int]]()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Host and port, as a client writes them."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def lead_to(self, addresses: Sequence[str]) -> None:
        """Pass connections on from now on. Args: addresses, HOST:PORT each; at least one."""
        found = [address.rpartition(":") for address in addresses]
        self._targets = tuple((host, int(port)) for host, _, port in found)
        self._thread = threading.Thread(target=self._serve, name="tcp-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._listener.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._pass_on, sock=self._listener))
        self._loop.run_forever()
        server.close()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = min(self._targets, key=lambda each: (self._open[each], self._given[each]))
        self._open[target] += 1
        self._given[target] += 1
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection(*target)
            await asyncio.gather(_copy(reader, there), _copy(back, writer))
        except (OSError, asyncio.CancelledError):  # the client sees that its connection ends
            pass
        finally:
            self._open[target] -= 1
            for each in (writer, there):
                if each is not None:
                    each.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until one side ends, and end the other."""
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    with suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
