"""RunConfig and its sections: frozen, validated, free of torch and of I/O."""

from posttrain.config.schema import RunConfig
from posttrain.config.sft import SftConfig

TrainingConfig = RunConfig | SftConfig  # what trains a model, step by step, in a run folder

__all__ = ["RunConfig", "SftConfig", "TrainingConfig"]
