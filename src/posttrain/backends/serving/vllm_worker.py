"""Extension of vLLM's worker processes: it loads weights and reports which ones are served.

vLLM mixes this class into its worker (``--worker-extension-cls posttrain.backends.serving.vllm_worker.WeightReceiver``) and
calls its methods by name. It runs in vLLM's Python, where posttrain is a folder on PYTHONPATH and need not be installed. Written
against vLLM 0.32 (``reload_weights(weights_iterator=...)`` of its model runner).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.models.weight_transfer import (
    Manifest,
    WeightsDiffer,
    check_folder,
    join_group,
    read_folder,
    read_manifest,
    receive_buckets,
)


class WeightReceiver:
    """Answers are JSON: ``{"version": 3, "content_hash": "…"}``, or ``{"error": "…"}`` with a message for the user."""

    model_runner: Any  # of vLLM's worker
    device: torch.device
    rank: int

    def posttrain_served(self) -> dict[str, Any]:
        """Return the weights loaded last; version 0 without a hash before the first."""
        served: dict[str, Any] = getattr(self, "_posttrain_served", {"version": 0, "content_hash": ""})
        return served

    def posttrain_load(self, folder: str, content_hash: str) -> dict[str, Any]:
        """Load the weights of a folder. All are checked before the first one replaces an old one."""
        path = Path(folder)
        try:
            manifest = read_manifest(path, content_hash)
            check_folder(path, manifest)
            return self._take(manifest, read_folder(path, manifest))
        except WeightsDiffer as error:
            return {"error": str(error)}

    def posttrain_adapter(self, folder: str, content_hash: str) -> dict[str, Any]:
        """Check the LoRA adapter of a folder, which vLLM loads next, and report it as served from now on."""
        path = Path(folder)
        try:
            manifest = read_manifest(path, content_hash)
            check_folder(path, manifest)
        except WeightsDiffer as error:
            return {"error": str(error)}
        self._posttrain_served = {"version": manifest.version, "content_hash": manifest.content_hash}
        return self._posttrain_served

    def posttrain_receive(
        self,
        manifest: str,
        backend: str,
        address: str,
        port: str,
        first_rank: str,
        size: str,
        bucket: str,
        timeout: str,
    ) -> dict[str, Any]:
        """Receive weights broadcast by rank 0 of a process group; this worker is rank ``first_rank`` + its own."""
        group = join_group(
            backend, address, int(port), int(first_rank) + getattr(self, "rank", 0), int(size), float(timeout)
        )
        try:
            expected = Manifest.from_json(manifest)
            device = self.device if backend == "nccl" else torch.device("cpu")
            return self._take(expected, receive_buckets(group, expected, int(bucket), device))
        except WeightsDiffer as error:
            return {"error": str(error)}

    def _take(self, manifest: Manifest, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Load weights. Raises: WeightsDiffer. While it runs, the old weights no longer count as served."""
        self._posttrain_served = {"version": -1, "content_hash": ""}
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        _pack_again(self.model_runner.model)
        self._posttrain_served = {"version": manifest.version, "content_hash": manifest.content_hash}
        return self._posttrain_served


def _pack_again(model: torch.nn.Module) -> None:
    """Repack the weights. On a CPU, vLLM multiplies by packed copies of the weights. Reloading repacks only loaded tensors; an
    output layer tied to the embedding is not loaded itself and would keep the copy of the old weights (seen in 0.32)."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
            if hasattr(layer, "_already_called_process_weights_after_loading"):
                del layer._already_called_process_weights_after_loading
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator, union-attr]
