"""Translation of a plan to the servers it names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from posttrain.backends.serving.replicas import Replicas
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.rollout_engine import SamplerPlan


def replicas_of(plan: SamplerPlan, urls: Sequence[str], health_path: str = "/health") -> Replicas:
    """Raises: ConfigError when the environment variable for the key is not set. The key itself is in no configuration."""
    headers = {}
    if variable := plan.options.get("api_key_env"):
        key = os.environ.get(str(variable), "").strip()
        if not key or not key.isascii() or not key.isprintable():
            what = "the environment variable that api_key_env names is not set, or holds no key"
            field = "rollout.engine_options.api_key_env"
            raise ConfigError(Problem(what, fix="set it in the shell that starts the run", field=field))
        headers["Authorization"] = f"Bearer {key}"
    return Replicas(
        urls=[url if "://" in url else f"http://{url}" for url in urls],
        headers=headers,
        timeout_s=plan.timeout_s,
        retries=plan.retries,
        in_flight=plan.max_concurrent_sequences,
        health_path=health_path,
    )
