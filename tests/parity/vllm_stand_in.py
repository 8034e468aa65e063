"""A program that is started as a Python with vLLM would be, and serves a tiny model in vLLM's words.

python vllm_stand_in.py FOLDER -m vllm.entrypoints.openai.api_server --model M --port P ...

Into FOLDER/PORT.json go its command line and what it was asked, when it ends. With --nnodes it has a part of the workers, and a
program with --headless the rest: they meet at --master-port, and calls of workers reach them all.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/backends/rollout"))

import torch
from transformers import AutoTokenizer

import conftest as servers
from posttrain.backends.rollout.hf import HuggingFaceEngine
from posttrain.backends.serving.vllm_worker import WeightReceiver
from posttrain.models.loading import load_causal_lm


class SharedOut(servers.StandIn):
    """Its weights are taken by several workers, each of which makes the calls that are for all of them."""

    workers: list[WeightReceiver]
    others: list[Any]  # connections to workers on other machines

    def answer(self, path: str, body: Any) -> Any:
        if path != "/collective_rpc":
            return super().answer(path, body)
        with ThreadPoolExecutor(len(self.workers) + len(self.others)) as pool:
            there = [pool.submit(ask, each, body) for each in self.others]
            return {"results": self.call(body) + [result for call in there for result in call.result()]}

    def call(self, body: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            calls = [pool.submit(getattr(each, body["method"]), *body.get("args", [])) for each in self.workers]
            return [call.result() for call in calls]


def ask(other: Any, body: Any) -> list[Any]:
    other.write(json.dumps(body) + "\n")
    other.flush()
    found: list[Any] = json.loads(other.readline())
    return found


def follow(it: SharedOut, options: argparse.Namespace) -> None:
    """Make the calls that arrive from the machine with the server."""
    until = time.monotonic() + 60
    while True:
        try:
            meeting = socket.create_connection((options.master_addr, options.master_port), timeout=60)
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)
    meeting.settimeout(None)
    with meeting.makefile("rw") as lines:
        for line in lines:
            lines.write(json.dumps(it.call(json.loads(line))) + "\n")
            lines.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-m")
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--headless", action="store_true")
    options, rest = parser.parse_known_args()
    torch.set_num_threads(1)
    model = load_causal_lm(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    it = SharedOut(model, HuggingFaceEngine(model, tokenizer, max_concurrent_sequences=64, max_prefill_tokens=1))
    here = options.tensor_parallel_size // options.nnodes
    it.workers, it.others = [WeightReceiver() for _ in range(here)], []
    for rank, worker in enumerate(it.workers, options.node_rank * here):
        worker.model_runner, worker.device, worker.rank = servers._Runner(it), torch.device("cpu"), rank
    if options.headless:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        (options.folder / f"{options.port}.json").write_text(json.dumps({"words": sys.argv[2:]}))
        follow(it, options)
        return
    if options.nnodes > 1:
        with socket.create_server(("", options.master_port)) as meeting:
            meeting.settimeout(60)
            joined = [meeting.accept()[0] for _ in range(options.nnodes - 1)]
        for each in joined:
            each.settimeout(None)
            it.others.append(each.makefile("rw"))
    server = servers._Server(("127.0.0.1", options.port), type("Handler", (servers._Handler,), {"stand_in": it}))
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(poll_interval=0.05)
    prompts = [body["prompt"] for body in it.generations()]
    told = {"words": sys.argv[2:], "rest": rest, "paths": it.paths(), "prompts": prompts}
    (options.folder / f"{options.port}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
