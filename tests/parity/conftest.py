"""A Ray cluster for the runs of these files. What several files share lies beside them (``ray_runs``)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def warm_runs(warm_children: None) -> None:
    """The runs of these files need not wait for Python to start."""


@pytest.fixture(scope="module")
def address(cluster: str) -> Iterator[str]:
    """Of the cluster, for the runs of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, both here, for all runs: it takes longer to start than they do."""
    from posttrain.backends.runtime.ray.cluster import SETTINGS
    from warm.processes import HERE, offer

    offer()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    folder = Path(tempfile.mkdtemp(prefix="ptr-"))  # short: its sockets' names may have 107 characters
    ray = [sys.executable, str(HERE / "ray_start.py"), "start"]
    options = ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000", "--num-cpus=8"]
    settings = f"--system-config={json.dumps(SETTINGS)}"
    first = [*ray, "--head", "--block", f"--port={port}", f"--temp-dir={folder}", settings, *options]
    second = [*ray, "--block", f"--address=127.0.0.1:{port}", *options[1:]]
    nodes = []
    try:
        for number, command in enumerate((first, second)):
            said = folder / f"node{number}.txt"
            with said.open("wb") as output:
                nodes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            until = time.monotonic() + 240
            while "Ray runtime started" not in said.read_text():
                assert nodes[-1].poll() is None and time.monotonic() < until, f"Ray does not start:\n{said.read_text()}"
                time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
