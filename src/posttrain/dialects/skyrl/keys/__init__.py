"""Every key of SkyRL: the state of June 2025, its names of August 2025, and what came later and is in use."""

from __future__ import annotations

from posttrain.dialects.ledger import Ledger
from posttrain.dialects.skyrl.keys import (
    algorithm,
    data,
    deepspeed,
    engines,
    loss,
    models,
    placement,
    records,
    sampling,
    trainer,
)
from posttrain.dialects.skyrl.keys.aliases import alias_rows

_ROWS = tuple(
    row
    for section in (data, placement, trainer, records, models, algorithm, loss, deepspeed, engines, sampling)
    for row in section.ROWS
)

LEDGER = Ledger(dialect="skyrl", version="2025-06", rows=(*_ROWS, *alias_rows(_ROWS)), versions=("2025-06", "2025-08"))
