"""Products of a mixture's experts, for widths that torch's grouped products do not take."""

from __future__ import annotations

from transformers import PreTrainedModel

# torch's grouped products (2.13) want rows of a multiple of 16 bytes, which is 8 numbers of bfloat16. A model that is loaded in
# float32 may be computed in bfloat16, so 8 holds for both.
MULTIPLE = 8


def takes_grouped_products(*widths: int) -> bool:
    """Return True where torch's grouped products take experts whose inputs and outputs are as wide as these."""
    return all(width % MULTIPLE == 0 for width in widths)


def multiply_any_width(model: PreTrainedModel) -> None:
    """Have the model's experts computed one after the other, by its own code, where grouped products do not take their widths.

    The numbers are the same but for the order of sums; a model without experts is left as it is.
    """
    # The weights of all experts of a layer are one tensor [experts, ., .].
    if not all(takes_grouped_products(*weight.shape[1:]) for weight in model.parameters() if weight.dim() == 3):
        model.set_experts_implementation("eager")
