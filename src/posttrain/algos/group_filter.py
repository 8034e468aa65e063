"""Dynamic sampling: the choice of the groups whose responses differ enough to learn from."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def passes(
    scores: Sequence[float],
    *,
    samples: int,
    above_std: float | None = None,
    above_mean: float | None = None,
    below_mean: float | None = None,
) -> bool:
    """Return True when a group's scores satisfy every given bound; all bounds are exclusive.

    The standard deviation is the sample one (n - 1), and exactly 0 when all scores are equal. A single score has none: the
    group passes that bound when it was sampled alone (samples 1), where nothing could ever pass, and fails it when it lost
    the others. A group without scores passes nothing.

    Args: scores, of the responses with a valid reward, in any unit; samples, responses sampled for the prompt.
    Source: arXiv:2503.14476 (DAPO), equation 11, for the standard deviation above 0; ROLL's query filter for the bounds.
    """
    if not scores:
        return False
    mean = statistics.fmean(scores)
    if above_std is None:
        spread = True
    elif len(scores) == 1:
        spread = samples == 1
    else:
        spread = statistics.stdev(scores) > above_std  # works with fractions: equal scores give exactly 0
    return spread and (above_mean is None or mean > above_mean) and (below_mean is None or mean < below_mean)
