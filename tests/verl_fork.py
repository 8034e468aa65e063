"""A checkout of a fork of verl, made for tests: the class of its own loop plays episodes that ask a server for passages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PLAYER = """
import not_installed_anywhere_but_unused
import json
import urllib.request
from dataclasses import dataclass
import torch
from verl import DataProto
from .joined import widened

@dataclass
class Limits:
    turns: int
    passage_tokens: int
    window: int
    url: str = None
    devices: int = 1

class Player:
    def __init__(self, tokenizer, actor_rollout_wg, limits, quiet=True):
        self.tokenizer, self.actor_rollout_wg, self.limits = tokenizer, actor_rollout_wg, limits

    def ids(self, texts):
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    def cut(self, responses):
        found = []
        for text in self.tokenizer.batch_decode(responses, skip_special_tokens=True):
            if "</find>" in text:
                text = text.split("</find>")[0] + "</find>"
            elif "</done>" in text:
                text = text.split("</done>")[0] + "</done>"
            found.append(text)
        return found

    def look_up(self, query):
        data = json.dumps({"query": query}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.limits.url, data)) as answer:
            return json.load(answer)["passage"]

    def take(self, text, search=True):
        if text.endswith("</done>"):
            return "", True
        if text.endswith("</find>"):
            query = text.removesuffix("</find>").rpartition("<find>")[2]
            return f"[{self.look_up(query) if search else ''}]", False
        return "?", False

    def play(self, rows, first):
        pad = self.tokenizer.pad_token_id
        ids, said, sampled = rows.batch["input_ids"], [], []
        for turn in range(self.limits.turns + 1):
            batch = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids),
                                         "position_ids": torch.arange(ids.shape[1])[None]})
            batch = widened(batch, self.limits.devices)
            out = self.actor_rollout_wg.generate_sequences(batch)
            (text,) = self.cut(out.batch["responses"][:1])
            observation, done = self.take(text, search=turn < self.limits.turns)
            (own,), (seen,) = self.ids([text]), self.ids([observation])
            last = done or turn == self.limits.turns
            seen = [] if last else seen[: self.limits.passage_tokens]
            said += own + seen
            sampled += [1] * len(own) + [0] * len(seen)
            if last:
                break
            ids = torch.cat([ids, torch.tensor([own + seen])], dim=1)[:, -self.limits.window:]
        responses = torch.tensor([said])
        made = DataProto.from_dict({"prompts": first, "responses": responses,
                                    "attention_mask": torch.ones(1, first.shape[1] + len(said), dtype=torch.long),
                                    "info_mask": torch.tensor([[1] * first.shape[1] + sampled])})
        made.meta_info["turns"] = turn + 1
        return made
"""
JOINED = """
import torch
from verl import DataProto

def widened(batch, rows):
    return DataProto.from_dict({name: value.repeat(rows, 1) for name, value in batch.batch.items()})
"""
TRAINER = """
from tensordict_that_is_not_here import TensorDict
from seeker.player import Limits, Player
from verl import DataProto

class RayPPOTrainer:
    def _mask(self, batch):
        batch.batch["loss_mask"] = batch.batch["info_mask"]
        return batch

    def fit(self):
        limits = Limits(
            turns=self.config.seeker.turns,
            passage_tokens=self.config.seeker.passage_tokens,
            window=self.config.data.max_prompt_length,
            url=self.config.seeker.get("url", None),
            devices=self.config.trainer.n_gpus_per_node * self.config.trainer.nnodes,
        )
        player = Player(self.tokenizer, actor_rollout_wg=self.actor_rollout_wg, limits=limits)
        for batch_dict in self.train_dataloader:
            batch = DataProto.from_single_dict(batch_dict)
            batch = batch.repeat(repeat_times=self.config.seeker.copies, interleave=True)
            rows = batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
            if not self.config.seeker.active:
                output = self.actor_rollout_wg.generate_sequences(rows)
            else:
                first = rows.batch["input_ids"][:, -self.config.data.max_prompt_length:].clone().long()
                output = player.play(rows, first)
            reward_tensor = self.reward_fn(batch)
            if self.config.actor_rollout_ref.actor.state_masking:
                batch = self._mask(batch)
            self.actor_rollout_wg.update_actor(batch)
"""
MAIN = """
import ray_that_is_not_here as ray
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.reward_score import found_it

class Scores:
    def __init__(self, tokenizer, num_examine, worth):
        self.tokenizer, self.worth = tokenizer, worth

    def __call__(self, data: DataProto):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for number in range(len(data)):
            row = data[number]
            text = self.tokenizer.decode(row.batch["responses"])
            truth = row.non_tensor_batch["reward_model"]["ground_truth"]["target"]
            rewards[number, -1] = self.worth * found_it.score(text, truth)
        return rewards

@ray.remote
def main_task(config):
    from verl.utils.fs import copy_that_no_version_has
    tokenizer = hf_tokenizer(copy_that_no_version_has(config.actor_rollout_ref.model.path))
    reward_fn = Scores(tokenizer=tokenizer, num_examine=0, worth=config.seeker.worth)
    trainer = RayPPOTrainer(config=config, tokenizer=tokenizer, reward_fn=reward_fn)
    trainer.fit()
"""
SCORE = """
def score(text, truth):
    return float(any(each in text for each in truth))
"""
BASE = """
data: {train_files: train.parquet, val_files: null, train_batch_size: 4, max_prompt_length: 512, max_response_length: 16}
actor_rollout_ref:
  model: {path: model}
  actor: {ppo_mini_batch_size: 8, ppo_micro_batch_size: 8, state_masking: true}
  rollout: {name: hf, n: 1, log_prob_micro_batch_size: 8}
  ref: {log_prob_micro_batch_size: 8}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 2, nnodes: 1, total_epochs: 1, total_training_steps: 2, logger: [console]}
seeker: {active: true, turns: 2, passage_tokens: 6, copies: 2, worth: 0.5, url: "http://127.0.0.1:9/look"}
"""
SCRIPT = "python3 -m verl.trainer.main_ppo \\\n    data.train_batch_size=4\n"


def write_fork(folder: Path, **changed: str) -> Path:
    """Write the checkout, and its launch script run.sh.

    Args: changed, files in the place of the usual ones: player, package, trainer, main. Returns: its folder.
    """
    files = {
        "seeker/__init__.py": changed.get("package", ""),
        "seeker/player.py": changed.get("player", PLAYER),
        "seeker/joined.py": JOINED,
        "verl/__init__.py": "from tensordict_that_is_not_here import TensorDict\n",
        "verl/trainer/__init__.py": "",
        "verl/trainer/main_ppo.py": changed.get("main", MAIN),
        "verl/trainer/ppo/ray_trainer.py": changed.get("trainer", TRAINER),
        "verl/trainer/config/ppo_trainer.yaml": BASE,
        "verl/utils/reward_score/__init__.py": "",
        "verl/utils/reward_score/found_it.py": SCORE,
        "run.sh": SCRIPT,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class _Passages(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        data = json.dumps({"passage": f"about {asked['query']}"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *_: object) -> None:
        pass


@contextmanager
def passages() -> Iterator[str]:
    """A server of passages on loopback. Yields: its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Passages)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/look"
    finally:
        server.shutdown()
        thread.join()
