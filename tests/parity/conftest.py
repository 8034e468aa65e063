"""A Ray cluster for the runs of a file."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray cluster of two nodes, both here, for all runs of a file: it takes longer to start than they do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["RAY_AUTH_MODE"] = "disabled"
    folder = tmp_path_factory.mktemp("r")
    ray = Path(sys.executable).with_name("ray")
    options = ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000", "--num-cpus=8"]
    first = [str(ray), "start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}", *options]
    second = [str(ray), "start", "--block", f"--address=127.0.0.1:{port}", *options[1:]]
    nodes = []
    try:
        for command in (first, second):
            nodes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            until = time.monotonic() + 120
            while not _answers(port):
                assert nodes[0].poll() is None and time.monotonic() < until, "Ray does not start"
                time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(60)
        del os.environ["RAY_AUTH_MODE"]
        shutil.rmtree(folder, ignore_errors=True)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
