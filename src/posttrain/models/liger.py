"""Liger's kernels (liger-kernel) in the layers of a model: Triton versions of norms, MLPs and rotary embeddings."""

from __future__ import annotations

from transformers import PreTrainedModel

from posttrain.errors import MissingDependency, ModelError, Problem
from posttrain.models.vision import has_vision
from posttrain.registry import missing_library


def use_liger(model: PreTrainedModel) -> None:
    """Replace the layers of ``model`` for which Liger has kernels, in place. The loss is not replaced: it is already fused.

    Raises: ModelError on a CPU, for a vision model, or for an architecture unknown to Liger; MissingDependency without
        liger-kernel.
    """
    if model.device.type == "cpu":
        what = "Liger's kernels run on a GPU, and this run is on the CPU"
        raise ModelError(Problem(what, fix="use model.liger=false", field="model.liger"))
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]  # liger_kernel, or its dependency triton
        raise MissingDependency(missing_library(library, "model.liger")) from error
    if has_vision(model.config):
        what = f"Liger's kernels are not supported for vision-language models, such as {model.config.model_type}"
        raise ModelError(Problem(what, fix="use model.liger=false", field="model.liger"))
    kind = model.config.get_text_config().model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        what = f"Liger has no kernels for {kind} (it has for {known})"
        raise ModelError(Problem(what, fix="use model.liger=false", field="model.liger"))
    # verl and transformers call this function, too; it has no public name for a loaded model.
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
