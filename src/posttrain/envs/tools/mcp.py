"""Tools of MCP servers, by the official SDK. The sole importer of mcp.

A server that is a program is started for the episode and ended with it; one at an address is contacted there. The SDK's
connection lives in one task of an event loop, so each server has a thread with such a loop, to which calls are submitted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TextIO

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.tool import Tool, ToolFailed
from posttrain.libraries.json_http import open_client
from posttrain.registry import TOOLS
from posttrain.settings import Positive

CLOSE_S = 10.0  # time limit for a server to end; the SDK kills it after some 4 s


@TOOLS.register("mcp", library="mcp", programs=("command",), variables=("token_env",))
def mcp(
    *,
    command: Sequence[str] | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    token_env: str | None = None,
    only: Sequence[str] | None = None,
    timeout_s: Positive = 30.0,
) -> list[Tool]:
    """All tools of a server, or those named in ``only``.

    Args: command, a program and its arguments, which speaks MCP on its standard input and output, and receives ``env`` and few
        other environment variables; or url, the address of one that speaks it over HTTP (streamable), with the token in the
        environment variable token_env; timeout_s for the server to be ready, and for each call.
    Raises: ConfigError when the server cannot be reached in that time, or lacks a tool named in ``only``.
    """
    if (command is None) == (url is None):
        what = "an MCP server is a command or a url, and " + ("neither is given" if url is None else "both are given")
        raise ConfigError(Problem(what, fix="give one of them"))
    server = _McpConnection(command, url, dict(env or {}), _token(token_env), timeout_s)
    try:
        offered = {tool.name: tool for tool in server.tools}
        if missing := [name for name in only or () if name not in offered]:
            what = f"the MCP server {server.name} has no tool {missing[0]!r} (it has: {', '.join(offered) or 'none'})"
            raise ConfigError(Problem(what, fix="name tools of the server in only"))
        wanted = [offered[name] for name in only] if only is not None else server.tools
        if not wanted:
            raise ConfigError(Problem(f"the MCP server {server.name} has no tools"))
    except ConfigError:
        server.close()
        raise
    return [
        Tool(
            name=tool.name,
            description=tool.description or "",
            parameters=tool.input_schema,
            run=partial(server.call, tool.name),
            close=server.close,
        )
        for tool in wanted
    ]


def _token(token_env: str | None) -> str:
    if token_env is None:
        return ""
    if not (token := os.environ.get(token_env)):
        raise ConfigError(Problem(f"the environment variable {token_env} is not set", fix="put the token into it"))
    return token


class _McpConnection:
    """A connection to a server, held by a thread of its own until it is closed."""

    def __init__(
        self, command: Sequence[str] | None, url: str | None, env: Mapping[str, str], token: str, timeout_s: float
    ):
        """Connect. Raises: ConfigError when this takes too long or fails."""
        self.name = url or " ".join(map(str, command or ()))
        self.tools: list[Any] = []
        self._command, self._url, self._env, self._token = command, url, env, token
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready: concurrent.futures.Future[Client] = concurrent.futures.Future()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._live, name="mcp", daemon=True)
        self._thread.start()
        try:
            self._client = self._ready.result(timeout_s)
        except Exception as error:  # noqa: BLE001 - of the SDK or the server
            self.close()
            said = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else _cause(error)
            what = f"the MCP server {self.name} cannot be used: {said}"
            raise ConfigError(Problem(what, fix="try its command, or its url, by hand")) from None

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. Returns: its text. Raises: ToolFailed with the reason, also after the time limit."""
        asking = self._client.call_tool(name, dict(arguments), read_timeout_seconds=self._timeout_s)
        try:
            found = asyncio.run_coroutine_threadsafe(asking, self._loop).result(self._timeout_s + 1.0)
        except TimeoutError:
            raise ToolFailed(f"no answer within {self._timeout_s:g} s") from None
        except MCPError as error:
            raise ToolFailed(f"the tool's server refused the call: {error}") from error
        except Exception as error:
            raise ToolFailed(f"the tool's server does not answer: {_cause(error)}") from error
        texts = [block.text for block in found.content if block.type == "text"]
        if found.is_error:
            raise ToolFailed("\n".join(texts) or "the tool has failed")
        if found.content and not texts:
            raise ToolFailed(f"the tool answered with {found.content[0].type}, which cannot be shown here")
        return "\n".join(texts)

    def close(self) -> None:
        """Close the connection; repeated calls are allowed."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the thread is ending, and has closed its loop
                self._loop.call_soon_threadsafe(self._end)
            self._thread.join(CLOSE_S)

    def _end(self) -> None:
        self._over.set()
        if not self._ready.done() and self._task is not None:
            self._task.cancel()

    def _live(self) -> None:
        try:
            self._task = self._loop.create_task(self._connected())
            self._loop.run_until_complete(self._task)
        except BaseException as error:  # noqa: BLE001 - of the SDK or the server; passed to the waiting caller
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _connected(self) -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(self._transport(stack)))
            page = await client.list_tools()
            self.tools += page.tools
            while page.next_cursor is not None:
                page = await client.list_tools(cursor=page.next_cursor)
                self.tools += page.tools
            self._ready.set_result(client)
            await self._over.wait()

    def _transport(self, stack: AsyncExitStack) -> Any:
        if self._command is not None:
            program, *arguments = map(str, self._command)
            nothing: TextIO = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115 - the stack closes it
            return stdio_client(StdioServerParameters(command=program, args=arguments, env=dict(self._env)), nothing)
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        assert self._url is not None
        return streamable_http_client(self._url, http_client=open_client(headers, connections=4))


def _cause(error: BaseException) -> str:
    """Return the first exception of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]
