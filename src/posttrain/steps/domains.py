"""The groups of a step that is made up of several domains, each with its number of prompts and its filter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.domains import interleaved
from posttrain.records.plans import DomainPlan
from posttrain.records.trajectories import Reward, ScoredGroup
from posttrain.steps.select import Selection


class DomainSelection:
    """A Selection for each domain: those that are not complete draw further prompts, the others wait."""

    def __init__(self, domains: Sequence[DomainPlan]):
        self._parts = {domain.name: Selection(domain.group_filter, domain.prompts) for domain in domains}
        self._domain_of = {source: domain.name for domain in domains for source in domain.sources}
        self.sampled: list[ScoredGroup] = []  # all of them, in order, also those without a place in the step

    @property
    def wanting(self) -> list[str]:
        """Return the names of the domains that need prompts."""
        return [name for name, part in self._parts.items() if not part.complete]

    @property
    def complete(self) -> bool:
        return not self.wanting

    @property
    def groups(self) -> list[ScoredGroup]:
        return interleaved([part.groups for part in self._parts.values()])

    @property
    def batches(self) -> int:
        return max(part.batches for part in self._parts.values())

    @property
    def sampled_tokens(self) -> int:
        return sum(part.sampled_tokens for part in self._parts.values())

    def counts(self) -> dict[str, Any]:
        """The numbers besides the groups, by domain, for ``of``."""
        return {name: part.counts() for name, part in self._parts.items()}

    @classmethod
    def of(
        cls, groups: Sequence[ScoredGroup], counts: Mapping[str, Mapping[str, int]], domains: Sequence[DomainPlan]
    ) -> DomainSelection:
        """A selection that was complete when it was saved."""
        found = cls(domains)
        for domain in domains:
            own = [group for group in groups if found._domain_of[group.group.prompt.data_source] == domain.name]
            found._parts[domain.name] = Selection.of(own, counts[domain.name], domain.group_filter, domain.prompts)
        return found

    def add(self, batch: Sequence[ScoredGroup]) -> None:
        """Take in groups that were sampled for the wanting domains. Raises: RunStopped as Selection does."""
        self.sampled += batch
        found: dict[str, list[ScoredGroup]] = defaultdict(list)
        for group in batch:
            found[self._domain_of[group.group.prompt.data_source]].append(group)
        for name, groups in found.items():
            self._parts[name].add(groups)

    def metrics(self) -> dict[str, float]:
        """The filters' counts together, where there is a filter, and means of every domain."""
        counts = Counter[str]()
        for part in self._parts.values():
            counts.update(part.metrics())
        found: dict[str, float] = {**counts, "rollout/batches": float(self.batches)} if counts else {}
        for name, part in self._parts.items():
            found |= {f"domain/{name}/{metric}": value for metric, value in _means(part.groups).items()}
        return found


def _means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Metrics of a domain's groups in a step."""
    rewards = [outcome.value for group in groups for outcome in group.outcomes if isinstance(outcome, Reward)]
    lengths = [trajectory.sampled_tokens for group in groups for trajectory in group.group.trajectories]
    found = {"prompts": float(len(groups)), "length_mean": sum(lengths) / len(lengths)}
    return found | ({"reward_mean": sum(rewards) / len(rewards)} if rewards else {})
