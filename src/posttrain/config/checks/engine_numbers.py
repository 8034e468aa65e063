"""Bounds of the numbers among a server's own options and sampling parameters, which have no fields of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posttrain.errors import Problem


class Bounds(NamedTuple):
    """The least and the greatest value; ``above`` excludes the least; ``off`` means no limit."""

    least: float
    most: float = float("inf")
    above: bool = False
    off: tuple[int, ...] = ()

    def holds(self, value: float) -> bool:
        return value in self.off or ((value > self.least if self.above else value >= self.least) and value <= self.most)

    def __str__(self) -> str:
        least = f"{'above' if self.above else 'at least'} {self.least:g}"
        most = f" and at most {self.most:g}" if self.most != float("inf") else ""
        return f"{least}{most}{''.join(f', or {value}' for value in self.off)}"


_COUNT = Bounds(1)
_SIZE = Bounds(0)
# Of vLLM's and SGLang's own settings
OPTIONS = {
    "block_size": _COUNT,
    "cpu_offload_gb": _SIZE,
    "inference_engine_pipeline_parallel_size": _COUNT,
    "long_prefill_token_threshold": _SIZE,
    "max_logprobs": Bounds(-1),
    "max_loras": _COUNT,
    "max_model_len": Bounds(1, off=(-1,)),
    "max_num_batched_tokens": _COUNT,
    "max_num_seqs": _COUNT,
    "max_running_requests": _COUNT,
    "num_gpu_blocks_override": _COUNT,
    "pipeline_parallel_size": _COUNT,
    "sleep_level": Bounds(1, 2),
    "swap_space": _SIZE,
}
SAMPLING = {
    "frequency_penalty": Bounds(-2, 2),
    "min_tokens": _SIZE,
    "presence_penalty": Bounds(-2, 2),
    "repetition_penalty": Bounds(0, above=True),
    "truncate_prompt_tokens": Bounds(1, off=(-1,)),
}


def number_problems(values: Mapping[str, Any], bounds: Mapping[str, Bounds], section: str) -> Iterator[Problem]:
    """Report the numbers of a section that no server takes. Values of another type are the server's to judge."""
    for name, bound in bounds.items():
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not bound.holds(value):
            yield Problem(f"{section}.{name} must be {bound}, not {value:g}", field=f"{section}.{name}")
