"""Test of the fast pass on a model: with a few tokens, layer by layer, against the model's own modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.cache import KeyValueCache
from posttrain.backends.rollout.native.decoder import STATE, Decoder, Past, unknown_parts
from posttrain.backends.rollout.native.kernels import PassKernels
from posttrain.backends.rollout.native.named_parts import attention_of, layers_of
from posttrain.backends.rollout.native.parts import mlp_of, router_of
from posttrain.errors import ModelError, Problem
from posttrain.models.attention import KNOWN, CachedRows
from posttrain.models.attention_settings import AttentionSettings
from posttrain.models.head import HeadForm, head_form, named, refused_if_it_fails
from posttrain.models.packed_attention import packed_layout

PROMPT = 5  # tokens
# Allowed difference of a layer's contribution: the same products, summed in another order. Seen: 1e-6 and 0.012.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
# That of the logits, where rounding may choose other experts.
OF_LOGITS = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.3}


@torch.inference_mode()
def fast_pass(model: PreTrainedModel, kernels: PassKernels | None = None) -> tuple[Decoder, HeadForm] | str:
    """Test the fast pass on ``model``. Returns: the pass, without weights yet, and the form of the head; or why it cannot be
    used, and the model's own modules are. The kernels are left out where the pass is correct only without them, or they cannot be
    run: its ``unused_kernels`` says why.

    Raises: ModelError for a model that cannot be sampled from either way.
    """
    form = unknown_parts(model) or head_form(model)
    if isinstance(form, str):
        with refused_if_it_fails(model):
            _check_modules(model)
        return form
    unused = ""
    for chosen in dict.fromkeys((kernels, None)):
        decoder = Decoder(model, chosen)
        try:
            with _same_experts(decoder, passes=2):
                reason = _difference(model, decoder)
        except Exception as error:  # noqa: BLE001 - no compiler, a device too small for Triton, parts called otherwise
            said = " ".join(str(error).split())[:200]
            unused = f"they cannot be run ({said})"
            reason = f"the fast pass cannot be run on {type(model).__name__} ({said})"
            continue
        finally:
            decoder.drop_weights()
        if not reason:
            decoder.unused_kernels = unused
            return decoder, form
        unused = "their results differ here"
    with refused_if_it_fails(model):
        _check_modules(model)
    return reason


def _check_modules(model: PreTrainedModel) -> None:
    """Check that a token after a prompt has the logits that it has in a pass over both, with the model's own modules.

    Raises: ModelError for a model that keeps more than keys and values of earlier tokens, or looks at later ones.
    """
    tokens, places = _probe(model)
    inputs = {"input_ids": tokens[None], "position_ids": places[None]}
    whole = model(**inputs, attention_layout=packed_layout([PROMPT + 1], model.device), use_cache=False).logits[0]
    cache = KeyValueCache.of(model)
    cache.prefilling([(0, PROMPT, 0, 0)])
    before = model(
        input_ids=tokens[None, :-1],
        position_ids=places[None, :-1],
        past_key_values=cache,
        attention_layout=packed_layout([PROMPT], model.device),
        use_cache=False,
    ).logits[0]
    cache.decoding([0], [PROMPT], [0])
    after = logits_by_modules(model, tokens[-1:], places[-1:], cache, CachedRows(cache))
    parts = torch.cat([before, after]).float()
    apart = float(((parts - whole.float()).norm(dim=1) / whole.float().norm(dim=1)).max())
    if not apart <= OF_LOGITS.get(model.dtype, 0.0):
        what = f"{named(model)} gives a token after a cached prompt other logits than in a pass over both ({apart:.1g} apart)"
        raise ModelError(Problem(what, fix=KNOWN))


def _probe(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return a few tokens from all over the vocabulary, and their positions, [PROMPT + 1] int64."""
    vocabulary: int = model.config.get_text_config().vocab_size
    tokens = torch.arange(1, PROMPT + 2, device=model.device) * (vocabulary // (PROMPT + 2))
    return tokens, torch.arange(PROMPT + 1, device=model.device)


def _difference(model: PreTrainedModel, decoder: Decoder) -> str:
    """Return where the fast passes and the model differ, on a short prompt and one token after it; "" when nowhere.

    The model's pass is observed for the scaling and window of each layer's attention, which are set in the decoder.
    """
    tokens, places = _probe(model)
    cache, own_cache = KeyValueCache.of(model), decoder.new_cache()
    cache.prefilling([(0, PROMPT, 0, 0)])
    own_cache.prefilling([(0, PROMPT, 0, 0)])
    layout = packed_layout([PROMPT], model.device)
    with _watching(decoder) as prefilled:
        model(
            input_ids=tokens[None, :-1],
            position_ids=places[None, :-1],
            past_key_values=cache,
            attention_layout=layout,
            use_cache=False,
        )
    cache.decoding([0], [PROMPT], [0])
    watched = _WatchedCache(cache)
    with _watching(decoder) as decoded:
        logits_by_modules(model, tokens[-1:], places[-1:], cache, CachedRows(watched))
    layers, attending = len(layers_of(decoder.body)), [n for n, kind in enumerate(decoder.kinds) if kind != STATE]
    if sorted(watched.settings) != attending or len(decoded) != layers or len(prefilled) != layers:
        return "its layers are not computed once each"
    if not all(_holds_sinks(decoder, *each) for each in watched.settings.items()):
        return "the sinks of its attention are no part of it"
    decoder.attention_settings = watched.settings
    decoder.read_weights()
    over_prompts = decoder.over_prompts(own_cache, layout, 0, PROMPT)
    reason = _first_difference(decoder, tokens[:-1], places[:-1], prefilled, over_prompts)
    if reason:
        return reason
    # Also shows that the passes agree about what is in a cache.
    own_cache.decoding([0], [PROMPT], [0])
    return _first_difference(decoder, tokens[-1:], places[-1:], decoded, decoder.over_cache(own_cache))


def _holds_sinks(decoder: Decoder, number: int, settings: AttentionSettings) -> bool:
    """Return True for a layer without sinks, and for one whose own they are."""
    return settings.sinks is None or settings.sinks is getattr(
        attention_of(layers_of(decoder.body)[number]), "sinks", None
    )


@contextmanager
def _same_experts(decoder: Decoder, passes: int) -> Iterator[None]:
    """Let routers choose in their first passes, and repeat these choices afterwards: of two experts that are nearly as good,
    rounding may choose another one, which would hide whether all else is the same."""
    chosen: dict[nn.Module, list[object]] = {}

    def choose(module: nn.Module, given: object, output: object) -> object:
        known = chosen.setdefault(module, [])
        known.append(output if len(known) < passes else known[len(known) - passes])
        return known[-1]

    routers = [router for layer in layers_of(decoder.body) if (router := router_of(mlp_of(layer))) is not None]
    hooks = [router.register_forward_hook(choose) for router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watching(decoder: Decoder) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record what every layer of the model is given and what it returns, [rows, hidden] each."""
    passed: list[tuple[Tensor, Tensor]] = []

    def watch(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        passed.append((given[0].flatten(0, 1), output.flatten(0, 1)))

    hooks = [layer.register_forward_hook(watch) for layer in layers_of(decoder.body)]
    try:
        yield passed
    finally:
        for hook in hooks:
            hook.remove()


def _first_difference(
    decoder: Decoder, tokens: Tensor, places: Tensor, passed: Sequence[tuple[Tensor, Tensor]], past: Past
) -> str:
    """Return which layer gives another result than the model's, for these tokens; "" when none does."""
    name = type(decoder.model).__name__
    embedded = decoder.embed(tokens, places)
    if not torch.allclose(embedded, passed[0][0]):
        return f"{name} changes its embeddings before the first layer"
    turns = decoder.rotation(embedded, places)
    for number, (given, output) in enumerate(passed):
        expected, got = output.float(), decoder.layer_step(number, given, turns, past).float()
        # Compare the layer's contribution only: the residual it is added to can be so large that only its rounding shows.
        scale = (expected - given.float()).norm(dim=1) + 0.01 * expected.norm(dim=1)
        apart = float(((got - expected).norm(dim=1) / scale).max())
        if not apart <= TOLERANCE.get(decoder.model.dtype, 0.0):
            return f"layer {number} of {name} gives another result ({apart:.1g} apart)"
    return ""


class _WatchedCache:
    """A cache that records the settings of each layer."""

    def __init__(self, cache: KeyValueCache):
        self.cache, self.latent = cache, cache.latent
        self.settings: dict[int, AttentionSettings] = {}

    def attend(self, layer: int, query: Tensor, settings: AttentionSettings) -> Tensor:
        self.settings[layer] = settings
        return self.cache.attend(layer, query, settings)


def logits_by_modules(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, cache: KeyValueCache, layout: CachedRows
) -> Tensor:
    """Compute logits after one token per row, [rows, vocabulary], with the model's own modules."""
    logits: Tensor = model(
        input_ids=token_ids[:, None],
        position_ids=positions[:, None],
        past_key_values=cache,
        attention_layout=layout,
        use_cache=False,
    ).logits[:, -1]
    return logits
