"""``ray start``, whose workers are warm."""

from __future__ import annotations

import sys
from pathlib import Path

from ray.scripts.scripts import main

sys.path.append(str(Path(__file__).parents[1]))
from warm.processes import warm_ray_workers

if __name__ == "__main__":
    warm_ray_workers()
    sys.argv[0] = "ray"
    main()
