"""The scorer of each data source: verl's table, SkyRL's environments, and this package's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import Problem, did_you_mean

NO_REWARD = "no_reward_for_data_source"  # value of Invalid.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A scorer and its options."""

    scorer: str
    options: Mapping[str, Any] = field(default_factory=dict)


class NoRewardForSource(Exception):
    """No scorer is known for the prompt's data source."""


# A name with a * at the end matches every name with that prefix; exact names take precedence.
TABLE: dict[str, Route] = {
    "openai/gsm8k": Route(scorer="gsm8k"),
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), Route(scorer="math")
    ),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning", "aime*"), Route(scorer="math_dapo")),
    **{
        f"numina_{part}": Route(scorer="prime_math")
        for part in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
    },
    "hiyouga/geometry3k": Route(scorer="geo3k"),
    **{
        f"searchR1_{part}": Route(scorer="search")
        for part in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    },
    # verl scores by the first ten tests only: when not all tests pass, by the share of those ten that do.
    **dict.fromkeys(
        ("codecontests", "apps", "codeforces", "taco"),
        Route(scorer="code", options={"continuous": True, "max_tests": 10}),
    ),
    # SkyRL's environments, whose env_class names the task
    "gsm8k": Route(scorer="gsm8k", options={"which": "first"}),
    "aime": Route(scorer="math_dapo", options={"box_fallback": False, "stop_at_tag": True}),
    "search": Route(scorer="search", options={"max_answer_tags": None}),
    "lcb": Route(scorer="code", options={"block": "last", "tolerance": 0.0}),
    "text2sql": Route(scorer="text2sql"),
    "reasoning_gym/*": Route(scorer="reasoning_gym"),
    "arithmetic/*": Route(scorer="exact_match"),
    "posttrain/count_shapes": Route(scorer="exact_match"),
}
# Data sources whose scorers need several turns with tools, planned for a later version.
PLANNED = ("searchcode",)


def find_route(data_source: str, more: Mapping[str, Route]) -> Route | None:
    """Return the scorer of a data source; ``more`` takes precedence over the table. None without one."""
    for table in (more, TABLE):
        if data_source in table:
            return table[data_source]
        for name, route in table.items():
            if name.endswith("*") and data_source.startswith(name[:-1]):
                return route
    return None


def no_route(data_source: str, more: Mapping[str, Route]) -> Problem:
    """Describe the problem of a data source without a scorer."""
    if data_source in PLANNED:
        return Problem(
            f"the scorer of data source {data_source!r} is planned; this version cannot run the tools that it needs",
            fix="leave these rows out, or score them with a function of your own (a term with path and data_sources)",
        )
    known = [*more, *TABLE]
    guess = did_you_mean(data_source, known, listed=True)
    return Problem(
        f"by_data_source knows no scorer for data source {data_source!r} (docs/rewards.md has the table)",
        fix=guess or "name one with the option sources, such as sources={" + repr(data_source) + ": math}",
    )
