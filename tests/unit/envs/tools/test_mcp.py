"""Tools of MCP servers: real ones, written with the official SDK."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.envs.tools import tools
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec
from posttrain.processes import descendants, proc

pytest.importorskip("mcp")

ASKED = [{"role": "user", "content": "Hm?"}]
SERVER = '''
import os, subprocess, sys, time
from mcp.server import MCPServer

server = MCPServer("shop")
if "--pids" in sys.argv:
    child = subprocess.Popen(["sleep", "600"])
    with open(sys.argv[-1], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")

@server.tool()
def price(fruit: str, pieces: int = 1) -> str:
    """The price of some fruit."""
    return f"{pieces} {fruit}: {pieces * 2} {os.environ.get('CURRENCY', 'coins')}"

@server.tool()
def broken() -> str:
    """Fails."""
    raise RuntimeError("out of order")

@server.tool()
def slow() -> str:
    """Takes its time."""
    time.sleep(600)
    return "late"

@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)

if "--port" in sys.argv:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[-1]))
else:
    server.run("stdio")
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path / "server.py"


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while proc.usage(pids).processes and time.monotonic() < deadline:
        time.sleep(0.02)
    return proc.usage(pids).processes == 0


@pytest.mark.slow
def test_a_program(server: Path, tmp_path: Path) -> None:
    """Schemas are offered as the server has them, failures are read by the model, and nothing is left behind."""
    pids = tmp_path / "pids"
    entry = {
        "name": "mcp",
        "command": [sys.executable, str(server), "--pids", str(pids)],
        "env": {"CURRENCY": "euros"},
        "timeout_s": 10.0,
    }
    env = tools(EnvSpec(name="tools", messages=ASKED), tools=[entry, "calculator"])
    offered = {tool["function"]["name"]: tool["function"] for tool in env.reset(0).tools}
    assert list(offered) == ["price", "broken", "slow", "leave", "calculator"]
    assert offered["price"]["description"] == "The price of some fruit."
    assert offered["price"]["parameters"]["required"] == ["fruit"]
    replies = call("price", fruit="figs", pieces=3) + call("price") + call("broken")
    texts = [message["content"] for message in env.step(replies).messages]
    assert texts[0] == "3 figs: 6 euros"
    assert texts[1] == "Error: the argument 'fruit' is missing"
    assert texts[2].startswith("Error: ") and "broken" in texts[2]
    [dead] = env.step(call("leave")).messages
    assert dead["content"].startswith("Error: the tool's server")
    [after] = env.step(call("price", fruit="figs")).messages  # it stays away, and so the calls fail one by one
    assert after["content"].startswith("Error: the tool's server")
    env.close()
    _, child = map(int, pids.read_text().split())
    descendants.kill([child])  # the server has left it behind by its own end; under a run, the worker's server ends it


@pytest.mark.slow
def test_a_call_has_a_deadline_and_the_server_ends_with_the_episode(server: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, str(server), "--pids", str(pids)]
    entry = {"name": "mcp", "command": command, "only": ["slow"], "timeout_s": 4.0}
    env = tools(EnvSpec(name="tools", messages=ASKED), tools=[entry])
    assert [tool["function"]["name"] for tool in env.reset(0).tools] == ["slow"]
    before = time.monotonic()
    [late] = env.step(call("slow")).messages
    assert late["content"].startswith("Error: ") and 3 < time.monotonic() - before < 8
    env.close()
    assert gone([int(pid) for pid in pids.read_text().split()])


@pytest.fixture
def address(server: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = subprocess.Popen(
        [sys.executable, str(server), "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    started.kill()
    started.wait()


@pytest.mark.slow
def test_an_address(address: str) -> None:
    env = tools(EnvSpec(name="tools", messages=ASKED), tools=[{"name": "mcp", "url": address, "only": ["price"]}])
    env.reset(0)
    assert env.step(call("price", fruit="plums")).messages[0]["content"] == "1 plums: 2 coins"
    env.close()
    with pytest.raises(ConfigError, match=r"has no tool 'weight' \(it has: price, broken, slow, leave\)"):
        tools(EnvSpec(name="tools"), tools=[{"name": "mcp", "url": address, "only": ["weight"]}])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, "neither is given"),
        ({"command": ["a"], "url": "b"}, "both are given"),
        ({"command": ["/nowhere/server"]}, "the MCP server /nowhere/server cannot be used: FileNotFoundError"),
        ({"command": ["sleep", "60"], "timeout_s": 0.3}, "cannot be used: no answer within 0.3 s"),
        ({"command": ["false"]}, "the MCP server false cannot be used"),
        ({"url": "http://127.0.0.1:9/mcp", "timeout_s": 5.0}, "the MCP server http://127.0.0.1:9/mcp cannot be used"),
        ({"url": "http://127.0.0.1:9/mcp", "token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN is not set"),
        ({"url": "http://127.0.0.1:9/mcp", "timeout_s": 0}, "timeout_s of the tool mcp is 0"),
    ],
)
def test_what_cannot_be_used(entry: dict[str, Any], words: str) -> None:
    before = connections()
    with pytest.raises(ConfigError, match=words):
        tools(EnvSpec(name="tools"), tools=[{"name": "mcp", **entry}])
    assert connections() == before


def connections() -> int:
    return sum(thread.name == "mcp" for thread in threading.enumerate())
