"""A program that is started as a Python with vLLM would be, and serves a tiny model in vLLM's words.

python vllm_stand_in.py FOLDER -m vllm.entrypoints.openai.api_server --model M --port P ...

Into FOLDER/PORT.json go its command line and what it was asked, when it ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
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

    def answer(self, path: str, body: Any) -> Any:
        if path != "/collective_rpc":
            return super().answer(path, body)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            calls = [pool.submit(getattr(each, body["method"]), *body.get("args", [])) for each in self.workers]
            return {"results": [call.result() for call in calls]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-m")
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    options, rest = parser.parse_known_args()
    torch.set_num_threads(1)
    model = load_causal_lm(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    it = SharedOut(model, HuggingFaceEngine(model, tokenizer, max_concurrent_sequences=64, max_prefill_tokens=1))
    it.workers = [WeightReceiver() for _ in range(options.tensor_parallel_size)]
    for rank, worker in enumerate(it.workers):
        worker.model_runner, worker.device, worker.rank = servers._Runner(it), torch.device("cpu"), rank
    server = servers._Server(("127.0.0.1", options.port), type("Handler", (servers._Handler,), {"stand_in": it}))
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(poll_interval=0.05)
    prompts = [body["prompt"] for body in it.generations()]
    told = {"words": sys.argv[2:], "rest": rest, "paths": it.paths(), "prompts": prompts}
    (options.folder / f"{options.port}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
