"""A worker section as a table: which of the keys that all have go where, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.dialects.ledger import Key, ignored, mapped, planned, refused
from posttrain.dialects.roll.keys.strategy import READERS, REST
from posttrain.dialects.roll.keys.worker import BLOCK, FIRST, Base

_C = "strategy_args.strategy_config"


Planned = tuple[str, tuple[Any, ...]]  # the reason, and values besides the default that ask for nothing


@dataclass(frozen=True, slots=True)
class Here:
    """Where a key goes. ``plain``: its value goes there alone, when the role is used; else a rule has a say."""

    fields: str
    change: str = ""
    to: Callable[[Any], Any] | None = None
    plain: bool = True


def by_rule(fields: str, change: str = "") -> Here:
    return Here(fields, change, plain=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A worker section, or all that a pattern with * stands for."""

    section: str
    strategy: Any  # type of strategy_args.strategy_name
    default_strategy: str | None = "fsdp2_train"
    first_strategy: str | None = "deepspeed_train"  # its default in mid-2025
    mapped: Mapping[str, Here] = field(default_factory=dict)
    planned: Mapping[str, Planned] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    otherwise: str  # why the rest is ignored
    always: bool = False  # whether its mapped keys count in every run, or only where the role is used
    config: tuple[Base, ...] = ()  # what its strategy_config may hold
    options: str = ""  # our field for that
    extra: tuple[Base, ...] = ()  # keys that only this section has


def rows(role: Role) -> tuple[Key, ...]:
    """All keys of the section."""
    config = (*role.config, REST) if role.options else (REST,)
    names = {"strategy_args.strategy_name", "strategy_args.strategy_config"}
    strategy = Base(
        "strategy_args.strategy_name",
        role.strategy,
        role.default_strategy,
        "what trains or samples",
        earlier={FIRST: role.first_strategy} if role.first_strategy != role.default_strategy else {},
    )
    bases = [strategy, *(base for base in (*BLOCK, *role.extra, *config) if base.name not in names)]
    last = {base.name: base for base in bases}  # a section may have a key of its own by a name that others have too
    return tuple(_row(role, base) for base in last.values())


def _row(role: Role, base: Base) -> Key:
    name = f"{role.section}.{base.name}"
    more: dict[str, Any] = {
        key: value for key in ("earlier", "since", "until", "note") if (value := getattr(base, key))
    }
    if here := role.mapped.get(base.name):
        return mapped(
            name, base.type, base.default, here.fields, base.meaning,
            to=here.to if here.plain else None, change=here.change, by_rule=not (here.plain and role.always), **more,
        )  # fmt: skip
    if base.name in role.planned:
        reason, off = role.planned[base.name]
        return planned(name, base.type, base.default, reason, base.meaning, off=off, **more)
    if base.name in role.ignored:
        return ignored(name, base.type, base.default, role.ignored[base.name], base.meaning, **more)
    if role.options and base.name.startswith(f"{_C}."):
        if base.name == f"{_C}.overlap_param_gather":
            return refused(name, base.type, base.default, "ROLL does not support it either", base.meaning, **more)
        option = base.name.removeprefix(f"{_C}.").removesuffix(".**").removesuffix("**")
        fields = ".".join([role.options, *option.split(".")[:2]]).rstrip(".")  # DeepSpeed's sections go deeper
        reader = READERS.get(base.name, "")
        return mapped(name, base.type, base.default, fields, base.meaning, by_rule=True,
                      change=f"handed to {reader or 'the engine'} when written", **more)  # fmt: skip
    return ignored(name, base.type, base.default, role.otherwise, base.meaning, **more)
