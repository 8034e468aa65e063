"""An agent as many exist: a loop around an OpenAI client, which knows nothing of training. It plays a guessing game.

`play` is named by examples/grpo_agent.yaml; the client finds the address and the token in the environment variables that such
clients read. Whatever it asks and is answered becomes the trajectory, token by token; what it returns is the reward.
"""

from __future__ import annotations

import random
import re

from openai import OpenAI

from posttrain.envs.agent import AgentEpisode


def play(episode: AgentEpisode, high: int = 10) -> dict[str, object]:
    secret = random.Random(episode.seed).randint(1, high)
    client = OpenAI()
    messages = [{"role": "user", "content": f"Guess my number, from 1 to {high}. Answer with a number only."}]
    for turn in range(1, 6):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        guess = re.search(r"\d+", answer.content or "")
        if guess and int(guess[0]) == secret:
            return {"reward": 1.0, "metrics": {"guesses": turn}}
        hint = "That is no number." if not guess else "Higher." if int(guess[0]) < secret else "Lower."
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": hint}]
    return {"reward": 0.0, "metrics": {"guesses": 5}}
