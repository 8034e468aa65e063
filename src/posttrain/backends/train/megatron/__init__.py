"""Models shared out over processes by megatron-core: layers' matrices, layers and sequences (arXiv:1909.08053, 2104.04473)."""

from __future__ import annotations

import warnings

# When it is imported, megatron-core warns of the kernels that it does without here (docs/cluster.md says so), in ten lines.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
# And megatron-core 0.16 calls two of torch's collectives by names that newer versions of torch have others for.
for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
    warnings.filterwarnings("ignore", message=rf"`torch\.distributed\.{name}` is deprecated", category=FutureWarning)

from posttrain.backends.train.megatron.critic import MegatronValueEngine  # noqa: E402
from posttrain.backends.train.megatron.engine import MegatronTrainEngine  # noqa: E402

__all__ = ["MegatronTrainEngine", "MegatronValueEngine"]
