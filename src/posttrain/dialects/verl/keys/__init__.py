"""The key ledger of verl, by section of its configuration."""

from __future__ import annotations

from posttrain.dialects.ledger import Ledger
from posttrain.dialects.verl.keys import (
    actor,
    algorithm,
    critic,
    data,
    evaluate,
    generate,
    loops,
    model,
    ref,
    reward,
    reward_model,
    rollout,
    serving,
    sft,
    trainer,
    translated,
    turns,
)

LEDGER = Ledger(
    dialect="verl",
    version="0.4",
    versions=("0.2", "0.4"),
    rows=(
        *data.ROWS,
        *model.ROWS,
        *actor.ROWS,
        *ref.ROWS,
        *rollout.ROWS,
        *serving.ROWS,
        *turns.ROWS,
        *critic.ROWS,
        *reward.ROWS,
        *reward_model.ROWS,
        *algorithm.ROWS,
        *trainer.ROWS,
        *loops.ROWS,
        *sft.ROWS,
        *evaluate.ROWS,
        *generate.ROWS,
        *translated.ROWS,
    ),
)
