"""Dispatch to the scorer of the prompt's data source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardFn
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.built_in import built_in
from posttrain.rewards.options import RunWide
from posttrain.rewards.sources import NoRewardForSource, Route, find_route, no_route


@REWARDS.register("by_data_source", runs_code=True)
def by_data_source(*, sources: Mapping[str, Any] | None = None, run_wide: RunWide | None = None) -> RewardFn:
    """A reward that calls the scorer of the prompt's data source, from the table of ``posttrain.rewards.sources``.

    Args: ``sources`` extends or overrides the table: a data source (a name ending in * matches every name with that prefix)
        and the name of a scorer, or a mapping with its ``name`` and ``options``.
    Raises: ConfigError for an unknown scorer in ``sources``.
    """
    return Dispatch(routes_of(sources), run_wide)


class Dispatch:
    """The scorers by data source, each built on first use."""

    def __init__(self, more: Mapping[str, Route], run_wide: RunWide | None):
        self._more = dict(more)
        self._run_wide = run_wide
        self._made: dict[str, RewardFn] = {}

    def __call__(self, prompt: Prompt, response: str) -> float | Mapping[str, object]:
        """Score a response. Raises: NoRewardForSource; any error of the scorer or of its construction."""
        data_source = prompt.data_source
        if find_route(data_source, self._more) is None:
            raise NoRewardForSource(str(no_route(data_source, self._more)))
        return self._of(data_source)(prompt, response)

    def check(self, data_source: str) -> None:
        """Raises: RequestError when prompts of this data source cannot be scored."""
        if find_route(data_source, self._more) is None:
            raise ConfigError(no_route(data_source, self._more))
        self._of(data_source)

    def _of(self, data_source: str) -> RewardFn:
        route = find_route(data_source, self._more)
        assert route is not None
        if data_source not in self._made:
            self._made[data_source] = built_in(route.scorer, route.options, self._run_wide)
        return self._made[data_source]


def routes_of(sources: Mapping[str, Any] | None) -> dict[str, Route]:
    """Parse the option ``sources``.

    Raises: ConfigError with all problems.
    """
    routes, problems = {}, []
    for source, said in (sources or {}).items():
        name, options = (said.get("name"), said.get("options", {})) if isinstance(said, Mapping) else (said, {})
        field = f"options.sources.{source}"
        if not isinstance(name, str) or not isinstance(options, Mapping):
            what = f"sources has {said!r} for {source!r}"
            problems.append(Problem(what, fix="write the name of a scorer, or {name: …, options: {…}}", field=field))
        elif name not in REWARDS.names() or name == "by_data_source":
            problems.append(REWARDS.problem(name, field))
        elif REWARDS.facts(name).queries_server:
            fix = f"add a term with name: {name} and data_sources: [{source}]"
            problems.append(Problem(f"{name} cannot be one of the sources of by_data_source", fix=fix, field=field))
        else:
            routes[source] = Route(scorer=name, options=dict(options))
    if problems:
        raise ConfigError(problems)
    return routes
