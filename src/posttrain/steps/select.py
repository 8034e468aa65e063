"""Dynamic sampling: which groups make up a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.algos.group_filter import passes
from posttrain.errors import RunStopped
from posttrain.records.plans import GroupFilterPlan
from posttrain.records.trajectories import Reward, ScoredGroup


class Selection:
    """The groups of one step, filled batch by batch until it is ``complete``.

    none takes the first batch as it is. refill keeps the groups that pass, of batch after batch, until there are ``wanted``;
    those beyond are dropped. replace takes a batch of which enough groups pass, and puts these, in turn, into the places of
    the others; other batches are dropped whole. drop keeps the groups of the first batch that pass; when none does, all stay
    to be looked at, without a part in the loss. mask keeps all groups of the first batch, those that do not pass without a part
    in the loss: they count in statistics of rewards, and the step has its updates. prefer takes the first ``wanted`` of the
    groups of ``oversample`` batches: those that pass, in order, then the others (arXiv:2502.01456, its online prompt filtering).
    """

    def __init__(self, plan: GroupFilterPlan, wanted: int):
        self._plan = plan
        self._wanted = wanted
        self.groups: list[ScoredGroup] = []
        self.sampled: list[ScoredGroup] = []  # all of them, in order, also those without a place in the step
        self.complete = False
        self.batches = 0
        self.sampled_tokens = 0
        self._sampled = self._passed = 0  # groups
        self._rejected: list[ScoredGroup] = []  # that prefer may still take

    @property
    def wanting(self) -> None:
        """Return the domains that need prompts: None, all rows."""
        return None

    def add(self, batch: Sequence[ScoredGroup]) -> None:
        """Take in a batch of groups that were sampled for this step.

        Raises: RunStopped when the step is still not complete after the allowed number of batches, or no response has the
            metric that is looked at.
        """
        self.batches += 1
        self.sampled += batch
        self._sampled += len(batch)
        self.sampled_tokens += sum(each.sampled_tokens for group in batch for each in group.group.trajectories)
        if self._plan.strategy == "none":
            self.groups, self.complete = list(batch), True
            return
        passing = [self._passes(group) for group in batch]
        kept = [group for group, passed in zip(batch, passing, strict=True) if passed]
        self._passed += len(kept)
        if self._plan.strategy == "mask" or (self._plan.strategy == "drop" and not kept):
            self.groups = [
                group if passed else replace(group, kept=False) for group, passed in zip(batch, passing, strict=True)
            ]
            self.complete = True
        elif self._plan.strategy == "drop":
            self.groups, self.complete = kept, True
        elif self._plan.strategy == "prefer":
            self.groups += kept
            self._rejected += [group for group, passed in zip(batch, passing, strict=True) if not passed]
            if self.batches == self._plan.oversample:
                self.groups = [*self.groups, *self._rejected][: self._wanted]
                self.complete = True
        elif self._plan.strategy == "refill":
            self.groups = [*self.groups, *kept][: self._wanted]
            self.complete = len(self.groups) == self._wanted
        elif kept and len(kept) / len(batch) >= self._plan.min_kept_share:  # replace
            copies = 0
            for group, passed in zip(batch, passing, strict=True):
                self.groups.append(group if passed else kept[copies % len(kept)])
                copies += not passed
            self.complete = True
        if not self.complete and self.batches == self._plan.max_batches:
            raise RunStopped(self._message())

    def counts(self) -> dict[str, int]:
        """The numbers besides the groups, for ``of``."""
        return {
            "batches": self.batches,
            "sampled_tokens": self.sampled_tokens,
            "sampled": self._sampled,
            "passed": self._passed,
        }

    @classmethod
    def of(cls, groups: list[ScoredGroup], counts: Mapping[str, int], plan: GroupFilterPlan, wanted: int) -> Selection:
        """A selection that was complete when it was saved."""
        found = cls(plan, wanted)
        found.groups, found.complete = groups, True
        found.batches, found.sampled_tokens = counts["batches"], counts["sampled_tokens"]
        found._sampled, found._passed = counts["sampled"], counts["passed"]
        return found

    def metrics(self) -> dict[str, float]:
        """Empty without a filter."""
        if self._plan.strategy == "none":
            return {}
        return {
            "rollout/batches": float(self.batches),
            "rollout/groups_sampled": float(self._sampled),
            "rollout/groups_passed": float(self._passed),
            "rollout/groups_kept": float(sum(group.kept for group in self.groups)),
        }

    def _passes(self, group: ScoredGroup) -> bool:
        rewards = [outcome for outcome in group.outcomes if isinstance(outcome, Reward)]
        scores = [value for reward in rewards for value in [_score(reward, self._plan.metric)] if value is not None]
        if rewards and not scores:
            terms = ", ".join(name for name, _ in rewards[0].terms) or "none"
            raise RunStopped(
                f"group_filter.metric = {self._plan.metric} is not among the terms of the responses to "
                f"{group.group.prompt.prompt_id} (its terms: {terms}); use one of them, or reward"
            )
        plan = self._plan
        return passes(
            scores,
            samples=len(group.outcomes),
            above_std=plan.above_std,
            above_mean=plan.above_mean,
            below_mean=plan.below_mean,
        ) and (plan.below_tokens is None or longest(group) < plan.below_tokens)

    def _message(self) -> str:
        plan = self._plan
        bounds = {
            "standard deviation above": plan.above_std,
            "mean above": plan.above_mean,
            "mean below": plan.below_mean,
            "tokens below": plan.below_tokens,
        }
        asked = ", ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)
        need = f"a step needs {self._wanted}"
        if plan.strategy == "replace":
            need = f"no batch had the share of {plan.min_kept_share:g} (at least one group) that replace needs"
        return (
            f"{self._passed} of {self._sampled} sampled groups passed the group filter ({plan.metric}: {asked}) in "
            f"{self.batches} batches of prompts, and {need}. Change one of these: easier or harder prompts, a larger "
            f"rollout.samples_per_prompt, wider group_filter bounds, a larger group_filter.max_batches"
        )


def longest(group: ScoredGroup) -> int:
    """Sampled tokens of the longest response of a group."""
    return max(each.sampled_tokens for each in group.group.trajectories)


def _score(reward: Reward, metric: str) -> float | None:
    return reward.value if metric == "reward" else dict(reward.terms).get(metric)
