"""A program that trains a policy by talking to it: OpenAI's client, a guessing game, and a reward for every conversation.

It plays against examples/open_run.yaml, or any run with environment.name=open; OPENAI_BASE_URL and OPENAI_API_KEY say where.
"""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

from openai import APIError, OpenAI

REWARDS = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/rewards"
GAMES, TRIES, HIGH = 160, 4, 10


def play(client: OpenAI, game: int, secret: int) -> float:
    """Play one game, whose conversations are a group, and send the reward."""
    messages = [{"role": "user", "content": f"Guess my number, from 1 to {HIGH}. Answer with a number only."}]
    conversation, reward = "", 0.0
    for _ in range(5):
        headers = {"X-Conversation-Id": conversation} if conversation else {"X-Group-Id": f"game {game}"}
        answer = client.chat.completions.create(model="policy", messages=messages, extra_headers=headers)
        conversation = answer.conversation
        text = answer.choices[0].message.content or ""
        guess = re.search(r"\d+", text)
        if guess and int(guess[0]) == secret:
            reward = 1.0
            break
        hint = "That is no number." if not guess else "Higher." if int(guess[0]) < secret else "Lower."
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    client.post(REWARDS, cast_to=object, body={"conversation": conversation, "reward": reward})
    return reward


def main() -> None:
    client = OpenAI()
    with ThreadPoolExecutor(16) as pool:
        games = [(game, random.Random(game).randint(1, HIGH)) for game in range(GAMES // TRIES) for _ in range(TRIES)]
        tasks = [pool.submit(play, client, game, secret) for game, secret in games]
        for number, task in enumerate(tasks):
            try:
                print(f"game {number}: {task.result()}", flush=True)
            except APIError as error:  # the run has ended, or the conversation has failed: the message says which
                print(f"game {number}: {error}", flush=True)


if __name__ == "__main__":
    main()
