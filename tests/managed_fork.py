"""A small fork of verl, made for tests, whose trainer plays episodes with an environment manager."""

from __future__ import annotations

import json
from pathlib import Path

# A world with a hidden letter for every start: an answer with that letter ends the episode with the reward 1
MANAGERS = '''
import numpy as np
import ray


@ray.remote(num_cpus=0.1)
class Hidden:
    """One copy. Which letter it hides, its own random numbers say."""

    def __init__(self, seed, letters):
        self.rng, self.letters = np.random.RandomState(seed), letters

    def reset(self):
        self.letter, self.asked = self.letters[self.rng.randint(len(self.letters))], 0
        return f"hidden among {self.letters}", {}

    def step(self, letter):
        self.asked += 1
        won = letter == self.letter
        return f"asked {self.asked}", float(won), won, {"won": won}


class Worlds:
    def __init__(self, count, copies, seed, letters):
        self.workers = [Hidden.remote(seed + place // copies, letters) for place in range(count * copies)]

    def reset(self):
        return zip(*ray.get([worker.reset.remote() for worker in self.workers]))

    def step(self, actions):
        return zip(*ray.get([w.step.remote(a) for w, a in zip(self.workers, actions)]))


class LetterManager:
    def __init__(self, worlds, config):
        self.worlds, self.config = worlds, config

    def reset(self, kwargs):
        seen, infos = self.worlds.reset()
        self.hint = [(row or {}).get("hint", "") for row in (kwargs if kwargs is not None else [None] * len(seen))]
        return {"text": [f"{h}Find it: {s}" for h, s in zip(self.hint, seen)], "image": None, "anchor": list(seen)}, list(infos)

    def step(self, text_actions):
        letters = [text.strip()[:1] for text in text_actions]
        seen, rewards, dones, infos = map(list, self.worlds.step(letters))
        for info, letter in zip(infos, letters):
            info["is_action_valid"] = np.array(letter in self.config.env.letters)
        return {"text": list(seen), "image": None, "anchor": list(seen)}, np.array(rewards), np.array(dones), infos

    def success_evaluator(self, total_infos, total_batch_list, episode_rewards, episode_lengths):
        won = [float(infos[len(turns) - 1]["won"]) for infos, turns in zip(total_infos, total_batch_list)]
        return {"success_rate": np.array(won), "length": np.array(episode_lengths)}


def make_worlds(config):
    count, copies, seed = config.data.train_batch_size, config.env.rollout.n, config.env.seed
    if "letters" in config.env.env_name.lower():
        worlds = Worlds(count, copies, seed, config.env.letters)
        held_out = Worlds(config.data.val_batch_size, 1, seed + 1000, config.env.letters)
        return LetterManager(worlds, config), LetterManager(held_out, config)
    print("no such world")
    exit(3)
'''
FIT = """
class RayPPOTrainer:
    def fit(self):
        for batch in self.train_dataloader:
            batch = self.player.play_all(batch, self.actor_rollout_wg, self.worlds, is_train=True)
            batch = adjust_batch(self.config, batch)
            batch.union(compute_reward(batch, self.reward_fn))
            {call}
            self.actor_rollout_wg.update_actor(batch)
"""
# The same with an estimator of its own: a turn's return, by a key, less the mean of the group's turns from the same state
OWN_FIT = """
from enum import Enum
from functools import partial

from ranked import core_ranked

class AdvantageEstimator(str, Enum):
    GAE = "gae"
    RANKED = "ranked"

def apply_invalid_action_penalty(data, invalid_action_penalty_coef):
    data.batch["step_rewards"] -= invalid_action_penalty_coef

def compute_advantage(data, adv_estimator, gamma=1.0, scale=1.0, **kwargs):
    if adv_estimator == AdvantageEstimator.GAE:
        raise NotImplementedError
    elif adv_estimator == AdvantageEstimator.RANKED:
        data.batch["advantages"], data.batch["returns"] = core_ranked.compute_ranked_advantage(
            step_rewards=data.batch["step_rewards"], mask=data.batch["response_mask"], scale=scale,
            states=data.non_tensor_batch["anchor_obs"], index=data.non_tensor_batch["uid"]{more},
        )
    return data

class RayPPOTrainer:
    def fit(self):
        for batch in self.train_dataloader:
            batch = self.player.play_all(batch, self.actor_rollout_wg, self.worlds, is_train=True)
            if self.config.algorithm.adv_estimator == AdvantageEstimator.RANKED:
                found = core_ranked.step_returns(batch=batch, gamma=self.config.algorithm.gamma)
                batch.batch["step_rewards"] = found
            batch = adjust_batch(self.config, batch)
            batch.union(compute_reward(batch, self.reward_fn))
            doubled = 2 * self.config.algorithm.ranked.get("scale", 1.0)
            compute = partial(compute_advantage, gamma=self.config.algorithm.gamma,
                              adv_estimator=self.config.algorithm.adv_estimator, scale=doubled)
            if self.config.algorithm.adv_estimator == AdvantageEstimator.RANKED and self.config.algorithm.ranked.get("slow"):
                batch.batch["advantages"] = self.weighted(batch)
            else:
                batch = compute(data=batch)
            self.actor_rollout_wg.update_actor(batch)
"""
CORE = """
import numpy as np
import torch
from verl import DataProto

def step_returns(batch: DataProto, gamma):
    rewards, episodes = batch.non_tensor_batch["rewards"], batch.non_tensor_batch["traj_uid"]
    found = np.zeros_like(rewards)
    for episode in np.unique(episodes):
        total = 0.0
        for place in reversed(np.where(episodes == episode)[0]):
            total = rewards[place] + gamma * total
            found[place] = total
    return torch.tensor(found, device=batch.batch["input_ids"].device)

def compute_ranked_advantage(step_rewards, mask, scale, states, index{takes}):
    breakpoint()
    scores = step_rewards.clone()
    for row in range(len(scores)):
        alike = [other for other in range(len(scores)) if (index[other], states[other]) == (index[row], states[row])]
        scores[row] = scale * (step_rewards[row] - step_rewards[alike].mean())
    found = scores[:, None] * mask
    return found, found
"""
MAIN = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

def run(config):
    from plays.worlds import make_worlds
    worlds, held_out = make_worlds(config)
    trainer = RayPPOTrainer(config=config, worlds=worlds, held_out=held_out)
    trainer.fit()
"""
LAUNCH = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator={estimator} \\
    data.train_files=rows.jsonl data.val_files=rows.jsonl \\
    data.train_batch_size=2 data.max_prompt_length=200 data.max_response_length=4 data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path={model} actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \\
    +actor_rollout_ref.actor.invalid_action_penalty_coef=0.5 algorithm.gamma=0.5 +algorithm.gigpo.mode=mean_std_norm \\
    +env.env_name=Letters +env.letters=abcd +env.seed=7 +env.max_steps=3 +env.rollout.n=3 \\
    trainer.n_gpus_per_node=1 trainer.total_epochs=2 trainer.test_freq=1 trainer.save_freq=-1 trainer.logger=[console] \\
    trainer.default_local_dir=out $@
"""


def managed_fork(
    folder: Path,
    *,
    model: str = "tiny",
    estimator: str = "gigpo",
    call: str = "pass",
    managers: str = MANAGERS,
    more: str = "",
) -> Path:
    """Write the fork, two rows and a launch; its trainer with an estimator of its own, ``ranked``, where that one is asked for,
    which gets ``more`` columns. Returns: the launch script."""
    fit = FIT.replace("{call}", call)
    if estimator == "ranked":
        fit = OWN_FIT.replace("{more}", f', more=data.batch["{more}"]' if more else "")
    files = {
        "ranked/core_ranked.py": CORE.replace("{takes}", ", more" if more else ""),
        "verl/trainer/main_ppo.py": MAIN,
        "verl/trainer/ppo/ray_trainer.py": fit,
        "plays/worlds/__init__.py": "from .managers import make_worlds\n",
        "plays/worlds/managers.py": managers,
        "rows.jsonl": "".join(
            json.dumps({"prompt": [{"role": "user", "content": "x"}], "data_source": "text"}) + "\n" for _ in "ab"
        ),
        "run.sh": LAUNCH.format(model=model, estimator=estimator),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "run.sh"
