"""Traffic between devices: the value, and the formulas that several engines share.

Per device (docs/scaling.md derives them): P parameters, w bytes of a gathered weight, r bytes of a reduced gradient, S devices
of a shard group, K such groups, M units that travel together:

    gather once        (S - 1) / S x P w                    M messages
    reduce once        (S - 1) / S x P r  + 2 (K - 1) / K x P / S x r      M messages, 2 M with K > 1
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.plan.placement import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one device receives in a step for one purpose."""

    what: str
    bytes: int
    messages: int  # collective operations, or transfers
    within: Axis | None = None  # ranks of one such group exchange them; None: processes of several roles


def gather(what: str, size: int, groups: Iterable[int], *, units: int, times: int, within: Axis = "shard") -> Traffic:
    """Gather all parts of so many bytes on every device. Args: groups of devices that each gather once; times of all that."""
    several = [group for group in groups if group > 1]
    return Traffic(
        what=what,
        bytes=times * sum(size * (group - 1) // group for group in several),
        messages=times * len(several) * units,
        within=within,
    )
