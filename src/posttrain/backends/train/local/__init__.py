"""One device, in this process."""

from posttrain.backends.train.local.critic import LocalValueEngine
from posttrain.backends.train.local.engine import LocalTrainEngine

__all__ = ["LocalTrainEngine", "LocalValueEngine"]
