"""Checkouts of made-up forks of verl that score by code of their own: in the main program, in a manager, or by data source."""

from __future__ import annotations

from pathlib import Path

# The older kind: the class and the choice by data source stand in the main program
MAIN = """
import ray_that_is_not_here as ray
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.reward_score import knights

def _select_rm_score_fn(data_source):
    if data_source == "knights":
        return knights.compute_score
    raise NotImplementedError(data_source)

def halved(score):
    return score / 2

class RewardManager:
    def __init__(self, tokenizer, num_examine, shaping=None):
        self.tokenizer, self.shaping = tokenizer, shaping or {}

    def __call__(self, data: DataProto):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            width = item.batch["prompts"].shape[-1]
            there = item.batch["attention_mask"]
            prompt = item.batch["prompts"][-there[:width].sum():]
            count = there[width:].sum()
            text = self.tokenizer.decode(torch.cat((prompt, item.batch["responses"][:count])))
            row = item.non_tensor_batch
            score = _select_rm_score_fn(row["data_source"])(text, row["reward_model"]["ground_truth"])
            rewards[i, count - 1] = halved(score) + self.shaping.get("bonus", 0)
        return rewards

@ray.remote
def main_task(config):
    shaping = config.algorithm.get("shaping", None)
    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0, shaping=shaping)
    val_reward_fn = RewardManager(tokenizer=tokenizer, num_examine=1)
    trainer = RayPPOTrainer(config=config, reward_fn=reward_fn, val_reward_fn=val_reward_fn)
    trainer.fit()
"""
KNIGHTS = """
def compute_score(text, truth):
    return float(text.endswith(truth)) + float(text.startswith("1 2"))
"""
# The later kind: a manager that calls a function by data source
NAIVE = """
import torch
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register

@register("naive")
class NaiveRewardManager:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"{arguments}):
        self.tokenizer, self.compute_score = tokenizer, compute_score or default_compute_score

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            count = item.batch["attention_mask"][item.batch["prompts"].shape[-1]:].sum()
            text = self.tokenizer.decode(item.batch["responses"][:count])
            row = item.non_tensor_batch
            rewards[i, count - 1] = self.compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
        return rewards
"""
SCORES = """
def default_compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "knights":
        from . import knights
        return knights.compute_score("1 2 " + solution_str, ground_truth)
    raise NotImplementedError(data_source)
"""
LATER_MAIN = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward import load_reward_manager

def run(config):
    judge = Judge.remote()
    reward_fn = load_reward_manager(config, tokenizer, num_examine=0, judge=judge)
    RayPPOTrainer(config=config, reward_fn=reward_fn).fit()
"""
TRAINER = """
class RayPPOTrainer:
    def fit(self):
        for batch in self.train_dataloader:
            batch = self.actor_rollout_wg.generate_sequences(batch)
            reward = compute_reward(batch, self.reward_fn)
            self.actor_rollout_wg.update_actor(batch)
"""
SCRIPT = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=t.parquet \\
  actor_rollout_ref.actor.ppo_micro_batch_size=8 actor_rollout_ref.rollout.log_prob_micro_batch_size=8 \\
  actor_rollout_ref.ref.log_prob_micro_batch_size=8 actor_rollout_ref.rollout.n=4 {words}
"""


def write(folder: Path, words: str = "", **files: str) -> Path:
    """Write a checkout with a launch script run.sh; ``words`` are further words of its command.

    Args: files, texts by the names of ``PLACES``. Returns: its folder.
    """
    written = dict.fromkeys(("verl/__init__.py", "verl/trainer/__init__.py", "verl/workers/__init__.py"), "")
    written["verl/trainer/ppo/ray_trainer.py"] = TRAINER
    written["run.sh"] = SCRIPT.format(words=words)
    written |= {PLACES[name]: text for name, text in files.items()}
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


PLACES = {
    "main": "verl/trainer/main_ppo.py",
    "naive": "verl/workers/reward_manager/naive.py",
    "dapo": "verl/workers/reward_manager/dapo.py",
    "scores": "verl/utils/reward_score/__init__.py",
    "knights": "verl/utils/reward_score/knights.py",
}
