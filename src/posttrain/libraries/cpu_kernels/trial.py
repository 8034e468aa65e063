"""Test of the update's kernels: each against torch's operations in the same dtype, by the distance of both to float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from posttrain.libraries.cpu_kernels.update import NormForm, UpdateKernels

ROWS, WIDTH = 9, 74  # no multiples of a vector
# Distances to float64 that are allowed: of torch's own, besides this share of the exact result, for other orders of sums.
TIMES, SHARE = 1.1, 2e-6

Formula = Callable[..., tuple[Tensor, ...]]  # from tensors of any dtype to a kernel's results


@torch.inference_mode(False)  # the sampler may be the first to use them: it scores prompts in that mode
@torch.no_grad()
def difference(kernels: UpdateKernels) -> str:
    """Return which kernel is farther from float64 than torch's operations are; "" when none is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, given, found, formula in _cases(kernels):
            exact = formula(*(each.double() if each.is_floating_point() else each for each in given))
            plain = formula(*given)
            for ours, theirs, true in zip(found, plain, exact, strict=True):
                allowed = TIMES * (theirs.double() - true).norm() + SHARE * true.norm()
                if not (ours.double() - true).norm() <= allowed:
                    return f"the compiled kernel for {name} gives another result than torch"
    return ""


def norm(x: Tensor, weight: Tensor, form: NormForm, eps: float = 1e-3) -> Tensor:
    """An RMS norm by torch's operations."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    if form == NormForm.ROUNDED:
        return normed.to(x.dtype) * weight
    gain = weight.to(wide.dtype)
    return (normed * (1.0 + gain if form == NormForm.ONE_MORE else gain)).to(x.dtype)


def _cases(
    kernels: UpdateKernels,
) -> Iterator[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...], Formula]]:
    """Yield each kernel's name, inputs, results on them, and formula."""
    dtype = kernels.dtype

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    for form in NormForm:
        x, weight, grad = 2 * draw(ROWS, WIDTH), draw(WIDTH), draw(ROWS, WIDTH)
        output, scales = kernels.norm_forward(x, weight, 1e-3, form)
        yield "norms", (x, weight), (output,), lambda x, weight, form=form: (norm(x, weight, form),)
        of_x, of_weight = kernels.norm_backward(grad, x, weight, scales, form, for_x=True, for_weight=True)
        assert of_x is not None and of_weight is not None
        slopes = _gradients(lambda x, weight, form=form: norm(x, weight, form))
        yield "gradients of norms", (grad, x, weight), (of_x, of_weight), slopes

    for is_gelu in (False, True):
        gate, up, grad = 3 * draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(ROWS, WIDTH)

        def gated(gate: Tensor, up: Tensor, is_gelu: bool = is_gelu) -> Tensor:
            return (gelu(gate, approximate="tanh") if is_gelu else silu(gate)) * up

        output = kernels.gated_forward(gate, up, gelu=is_gelu)
        yield "activations", (gate, up), (output,), lambda gate, up, f=gated: (f(gate, up),)
        both = kernels.gated_backward(grad, gate, up, gelu=is_gelu)
        yield "gradients of activations", (grad, gate, up), (both[0], both[1]), _gradients(gated)

    x, cos, sin = draw(ROWS, 3, WIDTH), draw(ROWS, WIDTH), draw(ROWS, WIDTH)
    yield "position embeddings", (x, cos, sin), (kernels.rotate(x, cos, sin),), lambda *given: (_rotate(*given),)
    back = kernels.rotate(x, cos, sin, backward=True)
    yield "gradients of position embeddings", (x, x, cos, sin), (back,), _gradients(_rotate, only=1)

    yield from _scores(kernels, draw)

    total = torch.randn(ROWS, WIDTH)
    added, more = total.clone(), draw(ROWS, WIDTH)
    kernels.add(more, added)
    yield "sums", (total, more), (added,), lambda total, more: (total + more,)

    weight, grad, mean, square = torch.randn(4, ROWS, WIDTH)
    start = weight, grad, mean, square.square_()
    mine, copy = [each.clone() for each in start], torch.empty(ROWS, WIDTH, dtype=dtype)
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.2}
    kernels.adamw(mine[0], mine[1], (mine[2], mine[3]), copy, **settings, steps=3, clip=0.5)  # type: ignore[arg-type]
    yield "AdamW", start, (mine[0], mine[2], mine[3]), _adamw
    yield (
        "rounding",
        (mine[0],),
        (copy,),
        lambda weight: (weight if weight.dtype == torch.float64 else weight.to(dtype),),
    )


def _scores(
    kernels: UpdateKernels, draw: Callable[..., Tensor]
) -> Iterator[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...], Formula]]:
    tile, targets = 3 * draw(ROWS, WIDTH), torch.arange(ROWS) * 12 + 5  # some are beyond the tile
    sums = tuple(torch.empty(4, ROWS))
    chosen = torch.zeros(ROWS)
    kernels.tile_forward(tile, 0.7, targets, 5, chosen, sums)
    here = targets - 5 < WIDTH
    place = (targets - 5).clamp(max=WIDTH - 1)[:, None]

    def summed(tile: Tensor) -> tuple[Tensor, ...]:
        x = tile.to(torch.promote_types(tile.dtype, torch.float32)) * 0.7
        top = x.amax(dim=1)
        below = x - top[:, None]
        e = below.exp()
        found = torch.where(here, x.gather(1, place)[:, 0], 0.0)
        return top, e.sum(dim=1), (e * below).sum(dim=1), e.square().sum(dim=1), found

    yield "sums of scores", (tile,), (*sums, chosen), summed

    a, b, entropies, shift, target = torch.randn(5, ROWS)

    def slope(tile: Tensor, a: Tensor, b: Tensor, entropies: Tensor, shift: Tensor, target: Tensor) -> tuple[Tensor]:
        log_p = tile.to(a.dtype) * 0.7 - shift[:, None]
        gradient = -1.5 * log_p.exp() * (a[:, None] + b[:, None] * (log_p + entropies[:, None]))
        gradient.scatter_(1, place, torch.where(here, target, gradient.gather(1, place)[:, 0])[:, None])
        return (gradient.to(tile.dtype),)

    found = tile.clone()
    rows_of = {"shift": shift, "of_logprobs": a, "of_entropy": b, "entropies": entropies, "at_target": target}
    kernels.tile_backward(found, 0.7, targets, 5, by=1.5, **rows_of)
    yield "gradients of scores", (tile, a, b, entropies, shift, target), (found,), slope


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def _adamw(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    grad = 0.5 * grad
    mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + (1 - 0.99) * grad.square()
    step = mean / (1 - 0.9**3) / ((square / (1 - 0.99**3)).sqrt() + 1e-3)
    return weight * (1 - 0.1 * 0.2) - 0.1 * step, mean, square


def _gradients(function: Callable[..., Tensor], only: int | None = None) -> Formula:
    """Return the function from an incoming gradient and inputs to the gradients of the first ``only`` inputs; None: of all."""

    def gradients(grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in given]
            return torch.autograd.grad(function(*inputs), inputs[:only], grad)

    return gradients
