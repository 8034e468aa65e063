"""tinker-cookbook's loops with the real client against `posttrain serve --api tinker`, and the same steps with our own engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import sequence_batch, train_batch
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.lora import LoraConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan
from warm.processes import WarmProcess

pytestmark = pytest.mark.slow
PACKAGES = ("tinker==0.38.0", "tinker-cookbook[math-rl]==0.5.8")
MODEL = "meta-llama/Llama-3.2-1B"  # a name for which the cookbook has a renderer
KEY = "tml-secret"
QUESTIONS = [(f"What is {a} + {b}?", a + b) for a in range(2, 5) for b in range(3, 5)]


@pytest.fixture(scope="module")
def client_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the client and the cookbook, which takes from this environment the packages whose versions suit it."""
    folder = tmp_path_factory.mktemp("client") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    (Path(site.strip()) / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [str(python), "-m", "pip", "install", "-q", "--no-compile", "--retries", "1", *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and ("No matching distribution" in done.stderr or "Connection" in done.stderr):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return str(python)


@pytest.fixture(scope="module")
def place(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the model and the loops' datasets under the names that they use."""
    folder = tmp_path_factory.mktemp("loops")
    shutil.copytree(tiny_qwen, folder / MODEL)
    robots, gsm8k = folder / "HuggingFaceH4" / "no_robots", folder / "openai" / "gsm8k"
    for each in (robots, gsm8k):
        each.mkdir(parents=True)
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": str(answer)}]
        for question, answer in QUESTIONS
    ]
    (robots / "train.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    rows = [{"question": question, "answer": f"#### {answer}"} for question, answer in QUESTIONS]
    (gsm8k / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = "  - split: train\n    path: train.jsonl\n"
    (gsm8k / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    return folder


class Server:
    """`posttrain serve --api tinker` in a process of its own."""

    def __init__(self, place: Path):
        arguments = [f"model.path={MODEL}", f"endpoint.name={MODEL}", "model.compute_dtype=float32", "endpoint.port=0"]
        arguments += ["endpoint.token_file=key", "placement.cpu_threads=1", "tinker.max_tokens_per_micro_batch=300"]
        self.process = WarmProcess(
            [sys.executable, "-m", "posttrain", "serve", "--api", "tinker", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=place,
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout)
        self.address = next(line for line in lines if line.startswith("TINKER_BASE_URL=")).strip().partition("=")[2]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(place: Path) -> Iterator[Server]:
    started = Server(place)
    yield started
    started.kill()


def run(python: str, place: Path, server: Server, *arguments: str) -> None:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.address,
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([python, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def batch_of(data: list[dict[str, Any]], chosen: str) -> TrainBatch:
    """Data as a batch of our own: a prompt of one token, and the rest as the response."""
    rows = [[*each["tokens"], each["inputs"]["target_tokens"][-1]] for each in data]
    width = max(map(len, rows))
    tokens, sampled = (
        torch.zeros(len(rows), width, dtype=torch.int64),
        torch.zeros(len(rows), width - 1, dtype=torch.bool),
    )
    values: dict[str, torch.Tensor] = {}
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        sampled[number, : len(row) - 1] = True
        for name, given in data[number]["inputs"].items():
            values.setdefault(name, torch.zeros(len(rows), width - 1))[number, : len(given)] = torch.tensor(
                given
            ).float()
    sequences = sequence_batch(
        tokens=tokens, prompt_lengths=torch.ones(len(rows), dtype=torch.int64), response_mask=sampled
    )
    return train_batch(sequences, values.get("advantages"), values[chosen] != 0, old=values.get("logprobs"))


@pytest.mark.parametrize(
    ("loop", "arguments", "chosen", "rates"),
    [
        ("sl_loop", ["batch_size=2", "learning_rate=1e-3", "save_every=2"], "weights", [1, 2 / 3, 1 / 3]),
        ("rl_loop", ["batch_size=2", "group_size=4", "max_tokens=6", "learning_rate=1e-3"], "advantages", [1, 1, 1]),
    ],
)
def test_a_loop_of_the_cookbook_gives_our_own_loop_s_losses(
    client_python: str, place: Path, server: Server, loop: str, arguments: list[str], chosen: str, rates: list[float]
) -> None:
    script = str(Path(__file__).with_name("tinker_recorded.py"))
    common = [f"model_name={MODEL}", "lora_rank=4", f"log_path={place / loop}"]
    run(client_python, place, server, script, loop, str(place / f"{loop}.json"), *common, *arguments)
    start, *steps = json.loads((place / f"{loop}.json").read_text())
    assert len(steps) == 3

    folder = place / "tinker" / start["start"].removeprefix("tinker://")
    model = load_causal_lm(str(place / MODEL), dtype=torch.float32, device="cpu")
    add_adapter(model, LoraConfig(adapter_path=str(folder)))
    settings = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=None)
    engine = LocalTrainEngine(
        model,
        None,  # type: ignore[arg-type]
        optimizer=settings,
        learning_rate_factor=lambda update: rates[update],
        sequences_per_micro_batch=2,
        sequences_per_scoring_batch=2,
        share_prompts=False,
    )
    for step in steps:
        batch = batch_of(step["data"], chosen)
        # The cookbook's weights of fine-tuning are 1 / the tokens of each sequence: a mean per sequence, summed.
        means = {"aggregation": "sequence_mean_token_mean", "policy_coef": float(len(batch))}
        sums: dict[str, Any] = means if loop == "sl_loop" else {"aggregation": "token_sum"}
        plan = LossPlan(name=step["loss_fn"], temperature=1.0, **sums)
        stats = engine.forward_backward(batch, plan, batch.counts())
        assert step["loss"] == pytest.approx(stats.loss, rel=1e-4, abs=1e-4)
        for number, datum in enumerate(step["data"]):
            places = batch.loss_mask[number]
            theirs = torch.tensor([*datum["logprobs"], *[0.0] * (len(places) - len(datum["logprobs"]))])
            assert stats.policy_logprobs[number][places].tolist() == pytest.approx(theirs[places].tolist(), abs=1e-4)
        engine.optimizer_step()
    if loop == "rl_loop":  # the sampler's log-probs are the trainer's, before the first step of each batch
        for datum in steps[-1]["data"]:
            pairs = zip(datum["inputs"]["logprobs"], datum["logprobs"], datum["inputs"]["advantages"], strict=True)
            assert all(sampled == pytest.approx(scored, abs=1e-3) for sampled, scored, advantage in pairs if advantage)


def test_a_killed_server_s_states_are_loaded_by_the_next_one(client_python: str, place: Path, server: Server) -> None:
    """The loop resumes from its checkpoint at a server that has started after SIGKILL, with the client's own calls."""
    arguments = [
        "-m",
        "tinker_cookbook.recipes.sl_loop",
        f"model_name={MODEL}",
        "batch_size=2",
        "lora_rank=4",
        "save_every=1",
    ]
    log = f"log_path={place / 'killed'}"
    run(client_python, place, server, *arguments, log, "max_steps=2")
    server.kill()
    checkpoints = (place / "killed" / "checkpoints.jsonl").read_text().splitlines()
    first = [line for line in checkpoints if json.loads(line)["name"] == "000001"]
    (place / "killed" / "checkpoints.jsonl").write_text("\n".join(first) + "\n")
    before = [json.loads(line) for line in (place / "killed" / "metrics.jsonl").read_text().splitlines()]
    again = Server(place)
    try:
        run(client_python, place, again, *arguments, log, "max_steps=2")
    finally:
        again.kill()
    after = [json.loads(line) for line in (place / "killed" / "metrics.jsonl").read_text().splitlines()]
    resumed = after[-1]
    assert (resumed["step"], before[-1]["step"]) == (1, 1)
    assert resumed["train_mean_nll"] == before[-1]["train_mean_nll"]
    assert resumed["grad_norm"] == before[-1]["grad_norm"]
