"""An address that stands for several servers."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from posttrain.backends.serving.launch import free_port
from posttrain.libraries.tcp_relay import TcpRelay


class Echo:
    """Says its name and what it has read, once the client has said all."""

    def __init__(self, name: bytes):
        self.name, self.taken = name, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self.listener.getsockname())
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.taken += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            said = b""
            while chunk := connection.recv(1 << 16):
                said += chunk
            connection.sendall(self.name + said)


@pytest.fixture
def servers() -> Iterator[list[Echo]]:
    found = [Echo(b"a:"), Echo(b"b:")]
    yield found
    for each in found:
        each.listener.close()


def connected(relay: TcpRelay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def answer(connection: socket.socket, text: bytes) -> bytes:
    connection.sendall(text)
    connection.shutdown(socket.SHUT_WR)
    said = b""
    while chunk := connection.recv(1 << 16):
        said += chunk
    return said


def test_connections_wait_for_the_servers_and_are_shared_out(servers: list[Echo]) -> None:
    with closing(TcpRelay()) as relay:
        early = connected(relay)  # before the servers are known
        relay.lead_to([each.address for each in servers])
        others = [connected(relay) for _ in range(3)]
        large = b"x" * (3 << 20)
        said = [answer(each, large) for each in (early, *others)]
        assert sorted(text[:2] for text in said) == [b"a:", b"a:", b"b:", b"b:"]
        assert all(text[2:] == large for text in said)
        assert [each.taken for each in servers] == [2, 2]


def test_servers_take_turns_where_connections_end_before_the_next(servers: list[Echo]) -> None:
    with closing(TcpRelay()) as relay:
        relay.lead_to([each.address for each in servers])
        said = []
        for _ in range(6):
            with connected(relay) as there:
                said.append(answer(there, b"hello"))
        assert [each.taken for each in servers] == [3, 3]
        assert set(said) == {b"a:hello", b"b:hello"}


def test_a_server_that_is_gone_ends_the_connection() -> None:
    with closing(TcpRelay()) as relay:
        relay.lead_to([f"127.0.0.1:{free_port()}"])
        with connected(relay) as there:
            try:
                assert answer(there, b"hello") == b""
            except OSError as error:  # the connection ended before all was said
                assert error.errno in (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE)


def test_a_relay_that_leads_nowhere_closes() -> None:
    relay = TcpRelay()
    host, _, port = relay.address.rpartition(":")
    relay.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10)
