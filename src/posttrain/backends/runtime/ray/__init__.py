"""Many devices: every role in worker processes that Ray places, this process giving the orders (docs/cluster.md).

Roles on the same devices share a worker per device and take turns in it; roles on other devices have workers of their own. The
orders are names, token ids and plain arrays. ``start.py`` starts the workers; ``cluster.py`` alone knows Ray. Every worker
imports this package first, so it loads no library of models: the driver loads ``start.py``, a worker what its roles need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.registry import RUNTIMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.config import RunConfig, SftConfig, TuneConfig
    from posttrain.interfaces.roles import Learner, Roles, Tuned
    from posttrain.records.batch_plans import BatchPlan, SftBatchPlan


@RUNTIMES.register("ray")
class Ray:
    """See interfaces.roles.Runtime."""

    def start(self, config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase) -> Roles:
        """Raises: ConfigError for a plan that cannot be; RunStopped when workers do not start; what loading the models raises."""
        from posttrain.backends.runtime.ray.start import started

        return started(config, batches, tokenizer, lambda start: start.roles())

    def start_sft(self, config: SftConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase) -> Learner:
        """Raises: as ``start``."""
        from posttrain.backends.runtime.ray.start import started

        return started(config, batches, tokenizer, lambda start: start.learner())

    def start_tune(self, config: TuneConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase) -> Tuned:
        """Raises: as ``start``."""
        from posttrain.backends.runtime.ray.start import started

        return started(config, batches, tokenizer, lambda start: start.tuned(config))
