"""Environments in the trainer's own process, stepped one after the other: for those that answer at once and cannot hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.backends.environments.make import (
    HostedEpisode,
    closed_of,
    failure_of,
    loading_failures,
    scored_of,
    start_of,
    step_of,
)
from posttrain.interfaces.env import EnvEvent, EnvFailed, EnvSpec, FinishedConversation


class InlineHost:
    """An EnvHost without processes, limits and deadlines."""

    def __init__(self) -> None:
        self._episodes: dict[str, HostedEpisode] = {}
        self._events: list[tuple[str, EnvEvent]] = []

    def load(self, names: Sequence[str]) -> dict[str, str]:
        return loading_failures(names)

    def start(self, episode: str, spec: EnvSpec, seed: int, saved: Any = None) -> None:
        def begin() -> dict[str, Any]:
            self._episodes[episode] = hosted = HostedEpisode(spec, seed)
            return hosted.reset() if saved is None else hosted.restore(saved)

        self._do(episode, begin, start_of)

    def score(self, episode: str, spec: EnvSpec, seed: int, conversation: FinishedConversation) -> None:
        self._do(episode, lambda: self._hosted(episode, spec, seed).score(conversation), scored_of)

    def task(self, episode: str, spec: EnvSpec, seed: int) -> None:
        self._do(episode, lambda: self._hosted(episode, spec, seed).task(), start_of)

    def _hosted(self, episode: str, spec: EnvSpec, seed: int) -> HostedEpisode:
        if episode not in self._episodes:
            self._episodes[episode] = HostedEpisode(spec, seed)
        return self._episodes[episode]

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        self._do(episode, lambda: self._episodes[episode].step(action, cut), step_of)

    def answer(
        self, episode: str, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int
    ) -> None:
        raise RuntimeError("environments that ask for turns by themselves are not started in this process")

    def finish(self, episode: str) -> None:
        self._do(episode, lambda: self._episodes.pop(episode).close(), closed_of)

    def drop(self, episode: str, failed: EnvFailed | None = None) -> None:
        self._close(episode)

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        events, self._events = self._events, []
        return events

    def abandon(self) -> None:
        for episode in list(self._episodes):
            self._close(episode)
        self._events = []

    def close(self) -> None:
        self.abandon()

    def _do(self, episode: str, work: Callable[[], Any], read: Callable[[Any], EnvEvent]) -> None:
        try:
            event = read(work())
        except Exception as error:  # noqa: BLE001 - someone's code; it costs the episode
            event = EnvFailed(*failure_of(error))
        if isinstance(event, EnvFailed):
            self._close(episode)
        self._events.append((episode, event))

    def _close(self, episode: str) -> None:
        if env := self._episodes.pop(episode, None):
            try:
                env.close()
            except Exception:  # noqa: BLE001 - the episode is lost or not wanted; what closing says changes nothing
                return
