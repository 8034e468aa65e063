"""GRPO (arXiv:2402.03300) as a loop of your own, with the numbers of `posttrain train`: python examples/own_loop.py run.yaml"""

import sys

import torch

import posttrain

with posttrain.start(sys.argv[1], sys.argv[2:]) as session:
    sampler, trainer = session.sampler, session.trainer
    for _ in session.steps():
        groups = sampler.sample(session.prompts())  # G responses per prompt, with their log-probs
        batch = session.batch(session.score(groups))  # r_i of every response; tensors of [B, T]
        advantages = torch.zeros(len(batch.rewards), dtype=torch.float64)
        for group in batch.sequences.group_index.unique():
            rows = (batch.sequences.group_index == group) & batch.scored.valid
            rewards = batch.rewards[rows].double()
            if len(rewards.unique()) > 1:  # else nobody did better than the others
                advantages[rows] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for mini_batch in trainer.mini_batches(batch, advantages):
            trainer.forward_backward(mini_batch)
            trainer.optim_step()
    print("saved", trainer.save(session.folder / "model"))
