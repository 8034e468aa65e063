"""The number of training samples of a step, after they are made to divide by the size of an update."""

from __future__ import annotations

from typing import Literal

Fit = Literal["none", "copy", "drop", "nearest", "one"]


def fitted_count(samples: int, multiple: int, fit: Fit) -> int:
    """Return how many of ``samples`` a step's updates have, once ``fit`` has made their number divide by ``multiple``.

    copy adds copies up to the next multiple; drop leaves out those beyond the last one; nearest copies where the rest beyond it
    is at least half of all samples, and leaves out otherwise; one takes ``multiple`` of them. Where there are fewer than
    ``multiple``, each of them copies. By hand, samples that divide by 48: of 256, copy makes 288, drop 240, nearest 240 and
    one 48; of 20, each makes 48.
    """
    rest = samples % multiple
    if fit == "none" or rest == 0:
        return samples
    if fit == "copy" or samples < multiple or (fit == "nearest" and 2 * rest >= samples):
        return samples - rest + multiple
    return multiple if fit == "one" else samples - rest
