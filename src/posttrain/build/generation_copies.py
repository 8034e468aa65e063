"""Copies of the sampler of a generation, each in a process of its own with devices of its own.

A part is sampled by one copy as a whole, so the responses are those of one device. Copies write their parts themselves, and
report rows and tokens, a line each.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

from posttrain.backends.runtime.inprocess import start_sampler
from posttrain.backends.serving.start import ranks_per_copy
from posttrain.backends.torch_training.start import pick_device
from posttrain.build.plans import sampling_params
from posttrain.config.generate import GenerateConfig
from posttrain.config.roles import shares_weights
from posttrain.data.generation import load_generation
from posttrain.errors import ConfigError, Problem, RequestError, RunInterrupted, RunStopped
from posttrain.libraries.cores import threads_of_a_process
from posttrain.loops import generate
from posttrain.loops.by_parts import OnWork
from posttrain.models.loading import import_modules, load_tokenizer
from posttrain.models.processors import load_processor
from posttrain.processes import descendants, proc, start
from posttrain.run.parts import Parts
from posttrain.run.stopping import StopSignal

LOOK_EVERY_S = 0.2
PATIENCE_S = 20.0  # for a copy to end on SIGTERM
_LAST_WORDS = 1000  # characters


def copies_of(config: GenerateConfig) -> int:
    """Return how many copies of the sampler the devices hold; 1 where servers that run already answer.

    Raises: ConfigError when this machine has fewer devices.
    """
    if config.rollout.endpoints or config.placement.devices == 1:
        return 1
    wanted = config.placement.devices
    if pick_device(config.placement.device).type == "cuda" and (there := torch.cuda.device_count()) < wanted:
        what = f"the generation has {wanted} devices, and this machine {there}"
        raise ConfigError(Problem(what, fix=f"use placement.devices={there}", field="placement.devices"))
    return max(1, wanted // devices_of_a_copy(config))


def devices_of_a_copy(config: GenerateConfig) -> int:
    """Return how many devices share a copy of the sampler."""
    return 1 if shares_weights(config.rollout.engine) else ranks_per_copy(config.rollout)


def sample_on_copies(
    config: GenerateConfig, copies: int, parts: Parts, request: Any, *, stop: StopSignal, on_work: OnWork
) -> None:
    """Sample every part that is not done yet, dealt over the copies.

    Raises: RunInterrupted when a signal asked to stop; RunStopped when a copy failed. The others' parts are kept.
    """
    missing = parts.missing()
    said: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    with ExitStack() as stack:
        started: list[_Copy] = []
        for number in range(min(copies, len(missing))):
            started.append(_Copy(config, number, missing[number::copies], request, said, copies))
            stack.callback(started[-1].close)
        running, told = set(range(len(started))), False
        while running:
            if stop.requested and not told:
                told = True
                for copy in started:
                    copy.process.terminate()
            try:
                number, line = said.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            if line is not None:
                on_work(line["rows"], line["tokens"])
                continue
            running.discard(number)
            code = started[number].process.wait()
            if code and not stop.requested:
                raise RunStopped(f"a copy of the sampler failed ({started[number].last_words(code)}); {done(parts)}")
    if stop.requested:
        raise RunInterrupted(f"stopped by {stop.name}; {done(parts)}; start it again to resume")


class _Copy:
    """A process that samples some of the parts."""

    def __init__(
        self,
        config: GenerateConfig,
        number: int,
        parts: Sequence[int],
        request: Any,
        said: queue.Queue[tuple[int, dict[str, Any] | None]],
        copies: int,
    ):
        alone = config.placement.model_copy(update={"devices": 1, "nodes": 1})
        order = {
            "config": config.model_copy(update={"placement": alone}).model_dump(mode="json"),
            "parts": list(parts),
            "request": request,
            "sys_path": sys.path,
        }
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the copy lives
        self.process = start.start(
            start.module_command("posttrain.build.generation_copies"),
            environment={**os.environ, **start.module_path(), **_share(config, number, copies)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode())
        self.process.stdin.close()
        threading.Thread(target=self._listen, args=(number, said), daemon=True).start()

    def _listen(self, number: int, said: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
        assert self.process.stdout is not None
        pending = b""
        while chunk := self.process.stdout.read(1 << 16):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                said.put((number, json.loads(line)))
        said.put((number, None))

    def last_words(self, code: int) -> str:
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip()[-_LAST_WORDS:]
        return words or start.ended_in_words(code)

    def close(self) -> None:
        """End the process and everything that it has started."""
        if self.process.poll() is None:
            below = [*proc.descendants(self.process.pid), *proc.of_session(self.process.pid)]
            self.process.terminate()
            start.end(self.process, PATIENCE_S)
            descendants.kill(below)
        self._said.close()


def _share(config: GenerateConfig, number: int, copies: int) -> dict[str, str]:
    """Return the variables with which a copy sees its own devices and its share of the cores."""
    size = devices_of_a_copy(config)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(each) for each in range(config.placement.devices)]
    threads = max(1, threads_of_a_process(config.placement.cpu_threads) // copies)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(devices[number * size : (number + 1) * size]),
        "OMP_NUM_THREADS": str(threads),
    }


def done(parts: Parts) -> str:
    """Say how many parts are done, and where they are."""
    left = parts.missing()
    return f"{len(parts) - len(left)} of {len(parts)} parts are done and kept in {parts.folder}"


def main() -> None:
    """Sample the parts that the first process names on stdin."""
    descendants.die_with_parent(os.getppid())
    order = json.loads(sys.stdin.buffer.read())
    sys.path[:] = order["sys_path"]
    config, out = GenerateConfig.model_validate(order["config"]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no report

    def on_work(rows: int, tokens: int) -> None:
        out.write(json.dumps({"rows": rows, "tokens": tokens}) + "\n")
        out.flush()

    import_modules(config.model.external_modules)
    tokenizer = load_tokenizer(config.model)
    rows = load_generation(config.data, tokenizer, load_processor(config.model, tokenizer, config.data))
    parts = Parts(
        Path(config.output.file),
        order["request"],
        column=config.output.column,
        rows=len(rows.prompts),
        rows_per_part=config.output.rows_per_part,
    )
    engine, _ = start_sampler(config, tokenizer)
    sampling = sampling_params(config.rollout, config.rollout.max_response_tokens, config.run.seed)
    with StopSignal() as stop:
        generate.run(engine, rows.prompts, sampling, parts, stop=stop, on_work=on_work, only=order["parts"])


if __name__ == "__main__":
    try:
        main()
    except RequestError as error:
        sys.exit("; ".join(str(problem) for problem in error.problems))
    except (RunStopped, RunInterrupted) as error:
        sys.exit(str(error))
