"""A group of episodes that an environment manager plays in lockstep."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from io import BytesIO
from typing import Any

import numpy as np

from posttrain.envs.env_manager.managers import manager_of, wrong
from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep, Message

IMAGE = "<image>"  # stands for the picture in a text
MOST_PIXELS, LEAST_PIXELS = 2048 * 2048, 256 * 256


class ManagedGroup:
    """An Env to its process; to the host, whose message it exchanges, an answer for each copy."""

    def __init__(self, spec: EnvSpec, made: Mapping[str, Any], *, copies: int, seat: int, penalty: float) -> None:
        self._spec, self._copies, self._penalty = spec, copies, penalty
        self._env_seed = int(_section(made["config"], "env").get("seed") or 0)
        self._manager = manager_of(made, copies=copies, seed=self._env_seed + seat)
        # Of each copy, until it is done
        self._turns: list[list[dict[str, Any]]] = [[] for _ in range(copies)]
        self._infos: list[list[Mapping[str, Any]]] = [[] for _ in range(copies)]
        self._done = [False] * copies
        self._last = [""] * copies

    def reset(self, seed: int) -> EnvStart:
        random.seed(seed + self._env_seed)
        np.random.seed((seed + self._env_seed) % 2**32)
        answer = self._manager.reset(self._spec.row.get("env_kwargs"))
        observed, _ = _parts(self._manager.title("reset"), answer, 2)
        starts = [
            EnvStart(messages=messages, state_key=key)
            for messages, key in self._observations("reset", observed, range(self._copies))
        ]
        return EnvStart(messages=[_answers([_plain(each) for each in starts])])

    def step(self, action: str) -> EnvStep:
        """Step all copies; None is the action of a copy that is over: its last one is repeated, and its answer not read."""
        acts = [each is not None for each in json.loads(action)]
        self._last = [one if one is not None else was for one, was in zip(json.loads(action), self._last, strict=True)]
        title = self._manager.title("step")
        observed, rewards, dones, infos = _parts(title, self._manager.step(list(self._last)), 4)
        rewards, dones = (
            _numbers(title, name, each, self._copies) for name, each in (("rewards", rewards), ("dones", dones))
        )
        if len(infos) != self._copies:
            raise wrong(f"{title} returned {len(infos)} infos for {self._copies} actions")
        acting = [place for place, acted in enumerate(acts) if acted]
        for place in acting:
            self._note(place, rewards[place], bool(dones[place]), infos[place])
        playing = [place for place in acting if not self._done[place]]
        following = dict(zip(playing, self._observations("step", observed, playing), strict=True))
        answers = []
        for place in range(self._copies):
            if not acts[place]:
                answers.append(_plain(EnvStep(done=True)))
                continue
            valid = self._turns[place][-1]["is_action_valid"]
            over = self._done[place] or len(self._turns[place]) == self._spec.max_turns
            messages, key = following.get(place, (None, None))
            answers.append(
                _plain(
                    EnvStep(
                        conversation=messages,
                        state_key=key,
                        reward=rewards[place],
                        penalty=0.0 if valid else self._penalty,
                        done=self._done[place],
                        stop="done" if self._done[place] else "",
                        metrics={"invalid_actions": float(not valid), **(self._success(place) if over else {})},
                    )
                )
            )
        return EnvStep(messages=[_answers(answers)])

    def close(self) -> Mapping[str, float]:
        """Keep the manager: the next group of this place is played by it."""
        return {}

    def _note(self, place: int, reward: float, done: bool, info: Mapping[str, Any]) -> None:
        valid = bool(np.all(info.get("is_action_valid", True)))
        self._turns[place].append({"rewards": reward, "active_masks": True, "is_action_valid": valid})
        self._infos[place].append(info)
        self._done[place] = done

    def _success(self, place: int) -> dict[str, float]:
        """The fork's verdict on one episode that is over."""
        turns = self._turns[place]
        title = self._manager.title("success_evaluator")
        found = self._manager.success(
            total_infos=[self._infos[place]],
            total_batch_list=[turns],
            episode_rewards=np.array([sum(each["rewards"] for each in turns)], dtype=np.float32),
            episode_lengths=np.array([len(turns)], dtype=np.float32),
        )
        if not isinstance(found, Mapping):
            raise wrong(f"{title} returned {_kind(found)} instead of a mapping of arrays")
        return {str(name): float(np.mean(value)) for name, value in found.items() if len(np.atleast_1d(value))}

    def _observations(
        self, method: str, observed: Any, places: Sequence[int]
    ) -> list[tuple[list[Message], str | None]]:
        """The messages and the state of each of these copies."""
        title = self._manager.title(method)
        if not isinstance(observed, Mapping):
            raise wrong(f"{title} returned observations that are {_kind(observed)} instead of a mapping with text")
        texts, images, states = (observed.get(name) for name in ("text", "image", "anchor"))
        if texts is None:
            raise wrong(f"{title} returned observations without text")
        for name, values in (("text", texts), ("image", images), ("anchor", states)):
            if values is not None and len(values) != self._copies:
                raise wrong(f"{title} returned {len(values)} observations under {name} for {self._copies} copies")
        found: list[tuple[list[Message], str | None]] = []
        for place in places:
            if not isinstance(texts[place], str):
                raise wrong(f"{title} returned {_kind(texts[place])} under text instead of a text")
            content: Any = texts[place]
            if images is not None and images[place] is not None:
                content = _with_picture(texts[place], images[place])
            key = None if states is None else state_key(states[place])
            found.append(([{"role": "user", "content": content}], key))
        return found


def state_key(state: Any) -> str:
    """A text that is equal for equal states: texts, numbers, arrays and collections of them."""
    if isinstance(state, str):
        return state
    if hasattr(state, "detach"):
        state = state.detach().cpu().numpy()
    if isinstance(state, np.ndarray):
        return hashlib.sha256(repr(state.flatten().tolist()).encode()).hexdigest()
    if isinstance(state, Mapping):
        return repr(sorted((str(key), state_key(value)) for key, value in state.items()))
    if isinstance(state, (list, tuple)):
        return repr([state_key(each) for each in state])
    return repr(state.item() if isinstance(state, np.generic) else state)


def _with_picture(text: str, image: Any) -> list[dict[str, Any]]:
    """The parts of a message whose text has a place for the picture."""
    before, _, after = text.partition(IMAGE)
    parts = [{"type": "text", "text": before}, {"type": "image", "image": _png(image)}, {"type": "text", "text": after}]
    return [part for part in parts if part.get("text") != ""]


def _png(image: Any) -> str:
    """A picture [height, width, 3] as a data URL, enlarged or reduced to what the forks' own loop shows."""
    from PIL import Image

    array = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    array = array * 255.0 if array.max() < 1 else array
    picture = Image.fromarray(array.astype(np.uint8))
    for limit, beyond in ((MOST_PIXELS, int.__gt__), (LEAST_PIXELS, int.__lt__)):
        if beyond(picture.width * picture.height, limit):
            factor = (limit / (picture.width * picture.height)) ** 0.5
            picture = picture.resize((int(picture.width * factor), int(picture.height * factor)))
    file = BytesIO()
    picture.convert("RGB").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _plain(answer: EnvStart | EnvStep) -> dict[str, Any]:
    return {each.name: getattr(answer, each.name) for each in fields(answer)}


def _answers(answers: Sequence[Mapping[str, Any]]) -> Message:
    return {"role": "group", "answers": list(answers)}


def _parts(title: str, answer: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or len(answer) != count:
        what = f"{len(answer)} values" if isinstance(answer, tuple) else _kind(answer)
        raise wrong(f"{title} returned {what} instead of {count} values")
    return answer


def _numbers(title: str, name: str, values: Any, count: int) -> list[float]:
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=float)
    except (TypeError, ValueError):
        raise wrong(f"{title} returned {name} that are no numbers: {values!r:.80}") from None
    if array.size != count:
        raise wrong(f"{title} returned {array.size} {name} for {count} actions")
    return [float(each) for each in array.reshape(count)]


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
