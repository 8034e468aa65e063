"""Norms and activations of a model by kernels, in the form in which their numbers are the module's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from posttrain.backends.rollout.native.kernels import ActivationKind, GateForm, GateKind, Kernels, PassKernels
from posttrain.libraries.cpu_kernels.update import NormForm
from posttrain.models.fused_layers import GELU_TANH, SILU

Rows = Callable[[Tensor], Tensor]  # a function from rows to rows

CLOSE = 1e-2  # largest distance of a kernel's numbers to a module's, of their size: where they are rounded differs
PLAIN_EPS = 1e-5  # of norms that do not say theirs
FORMULAS: dict[ActivationKind, Rows] = {
    ActivationKind.RELU: relu,
    ActivationKind.SQUARED_RELU: lambda x: relu(x).square(),
    ActivationKind.SILU: silu,
    ActivationKind.GELU: gelu,
    ActivationKind.GELU_TANH: partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, eq=False)
class KernelNorm:
    """An RMS norm by a kernel."""

    kernels: PassKernels
    weight: Tensor
    eps: float
    form: NormForm

    def __call__(self, rows: Tensor) -> Tensor:
        return self.kernels.norm(rows, self.weight, self.eps, self.form)


@dataclass(frozen=True, slots=True, eq=False)
class KernelLayerNorm:
    """A norm around the mean by a kernel."""

    kernels: Kernels
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return self.kernels.layer_norm(rows, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class KernelGated:
    """The activation of the first half of a row, times the second half, by a kernel."""

    kernels: PassKernels
    form: GateForm

    def __call__(self, gate_up: Tensor) -> Tensor:
        return self.kernels.gated(gate_up, self.form)


@dataclass(frozen=True, slots=True, eq=False)
class KernelActivation:
    """An activation without a gate by a kernel."""

    kernels: Kernels
    kind: ActivationKind

    def __call__(self, rows: Tensor) -> Tensor:
        return self.kernels.activate(rows, self.kind)


class KernelParts:
    """Reads norms and activations, with kernels where there are some for a part; other modules as they are."""

    def __init__(self, kernels: PassKernels | None):
        self.kernels = kernels
        self._norm_forms: dict[tuple[type, int], NormForm | None] = {}  # by class and width
        self._centred: dict[tuple[type, int], bool] = {}

    def norm(self, module: Any) -> Rows:
        """Read a norm."""
        kernels = self.kernels
        weight, bias = (_detached(getattr(module, name, None)) for name in ("weight", "bias"))
        width = len(weight) if weight is not None else getattr(module, "normalized_shape", (0,))[-1]
        given = [each for each in (weight, bias) if each is not None]
        if (
            kernels is None
            or width < kernels.narrowest
            or not all(each.shape == (width,) and each.dtype == kernels.dtype for each in given)
        ):
            return cast(Rows, module)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        kind = type(module), width
        if weight is not None and bias is None and eps is not None:
            if kind not in self._norm_forms:
                self._norm_forms[kind] = _norm_form(kernels, module, weight, eps)
            form = self._norm_forms[kind]
            if form is not None:
                return KernelNorm(kernels, weight, eps, form)
        if not isinstance(kernels, Kernels):
            return cast(Rows, module)
        found = KernelLayerNorm(kernels, weight, bias, PLAIN_EPS if eps is None else eps)
        if kind not in self._centred:
            x = _probe(width, kernels.dtype)
            self._centred[kind] = _close(found(x), module(x))
        return found if self._centred[kind] else cast(Rows, module)

    def gated(self, activation: nn.Module, width: int) -> Rows:
        """Return the activation of the first half of a row, times the second half."""
        known = isinstance(activation, SILU + GELU_TANH)
        if self.kernels is not None and known and width >= self.kernels.narrowest:
            kind = GateKind.GELU if isinstance(activation, GELU_TANH) else GateKind.SILU
            return KernelGated(self.kernels, GateForm(kind))

        def gated(gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=1)
            activated: Tensor = activation(gate)
            return activated.mul_(up)

        return gated

    def own_gate(self, by_module: Rows, width: int, form: GateForm, device: torch.device) -> Rows:
        """Return the activation of a gate by a kernel, where it has this form. Args: by_module, the model's own code."""
        if self.kernels is None or width < self.kernels.narrowest:
            return by_module
        found, x = KernelGated(self.kernels, form), (form.limit * _probe(2 * width, self.kernels.dtype)).to(device)
        return found if _close(found(x), by_module(x)) else by_module

    def ungated(self, activation: nn.Module, width: int) -> Rows:
        """Return an activation without a gate."""
        parameters = next(activation.parameters(), None) is not None
        if isinstance(self.kernels, Kernels) and width >= self.kernels.narrowest and not parameters:
            x = torch.linspace(-8, 8, 257, dtype=torch.float64)
            found = activation(x)
            for kind, formula in FORMULAS.items():
                if torch.allclose(found, formula(x), rtol=0, atol=1e-6):
                    return KernelActivation(self.kernels, kind)
        # NewGELUActivation computes the same by six operations of torch
        return partial(gelu, approximate="tanh") if isinstance(activation, GELU_TANH) else cast(Rows, activation)


def _detached(tensor: object) -> Tensor | None:
    return tensor.detach() if isinstance(tensor, Tensor) else None


def _norm_form(kernels: PassKernels, module: Any, weight: Tensor, eps: float) -> NormForm | None:
    """Return the form of an RMS norm in which the kernel's numbers are the module's, but for its rounding; None for other
    norms."""
    x = _probe(len(weight), weight.dtype).to(weight.device)
    own = module(x).detach().float()
    apart = {form: float((kernels.norm(x, weight, eps, form).float() - own).norm()) for form in NormForm}
    form = min(NormForm, key=lambda form: apart[form])
    return form if apart[form] <= CLOSE * float(own.norm()) else None


def _probe(width: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(8, width, generator=torch.Generator().manual_seed(0)) + 1).to(dtype)


def _close(found: Tensor, own: Tensor) -> bool:
    return bool((found.float() - own.detach().float()).norm() <= CLOSE * own.detach().float().norm())
