"""Scoring by functions that ask a language model of the run's own at an address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from posttrain.config.reward import RewardConfig
from posttrain.libraries.tcp_relay import TcpRelay
from posttrain.records.trajectories import Outcome, TrajectoryGroup
from posttrain.rewards.scorer import Scorer


class AskingScorer(Scorer):
    """A scorer whose functions know the address of servers that are started later."""

    def __init__(self, start: Callable[[RewardConfig], Scorer], config: RewardConfig):
        """Args: start makes the scorer of a configuration, in which functions get the address."""
        self._relay = TcpRelay()
        try:
            self._scorer = start(with_address(config, self._relay.address))
        except BaseException:
            self._relay.close()
            raise

    def lead_to(self, addresses: Sequence[str]) -> None:
        """Pass questions on to these servers, HOST:PORT each."""
        self._relay.lead_to(addresses)

    def begin(self, group: TrajectoryGroup, *, keep: bool = False) -> None:
        self._scorer.begin(group, keep=keep)

    def scorable(self, group: TrajectoryGroup) -> list[Future[bool]]:
        return self._scorer.scorable(group)

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        return self._scorer.score(groups)

    def forget(self, groups: Sequence[TrajectoryGroup]) -> None:
        self._scorer.forget(groups)

    def at_step(self, step: int) -> None:
        self._scorer.at_step(step)

    def keep_in(self, folder: Path) -> None:
        self._scorer.keep_in(folder)

    def take_costs(self) -> dict[str, float]:
        return self._scorer.take_costs()

    def close(self) -> None:
        self._scorer.close()
        self._relay.close()


def with_address(config: RewardConfig, address: str) -> RewardConfig:
    """The configuration in which every function of the user's gets the address of the served model."""
    assert config.served is not None
    name = config.served.address_as
    terms = [
        term.model_copy(update={"options": {name: address} | term.options})
        if term.path and term.kind == "function"
        else term
        for term in config.terms
    ]
    return config.model_copy(update={"terms": terms})
