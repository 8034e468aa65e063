"""Training engine on megatron-core: tensor, pipeline and sequence parallelism (arXiv:1909.08053, 2104.04473)."""

from __future__ import annotations

import warnings

# At its import megatron-core warns, in ten lines, of kernels that it does without here (see docs/cluster.md).
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
# And megatron-core 0.16 calls two of torch's collectives by deprecated names.
for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
    warnings.filterwarnings("ignore", message=rf"`torch\.distributed\.{name}` is deprecated", category=FutureWarning)

from posttrain.backends.train.megatron.critic import MegatronValueEngine  # noqa: E402
from posttrain.backends.train.megatron.engine import MegatronTrainEngine  # noqa: E402

__all__ = ["MegatronTrainEngine", "MegatronValueEngine"]
