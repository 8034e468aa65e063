"""Key/value cache of the sequences being decoded: every prompt is stored once, every response in its own slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.rounded_prompts import RoundedPrompts, RoundingKernel
from posttrain.backends.rollout.native.slots import LENGTH_UNUSED, Past, Slots, TiledSlots, rounded_up
from posttrain.models.attention_settings import AttentionSettings
from posttrain.models.latent_attention import has_latents, stored
from posttrain.models.recurrent import States, layers_with_keys

# Largest number of keys of a pass for which plain copies are faster (12,288: 28 us for 84; 49,152: 265 for 144).
FEW_NUMBERS = 1 << 15


class KeyValueCache:
    """Key/value cache of all layers, in two parts: ``prompts`` and ``responses``.

    All samples of a prompt read one copy of its keys and values, as rows of one matrix product. In both parts the active slots
    come first; the caller moves the last one into a gap. With a ``tile_step`` responses are in TiledSlots, for kernels only.

    Takes the place of a transformers cache: attention layers call ``update``. ``prefilling`` or ``decoding`` announces the rows
    of the next forward pass.
    """

    def __init__(
        self,
        *,
        layers: Iterable[int],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        most_slots: int | None = None,
        tile_step: int | None = None,
        latent: bool = False,
        rounding: RoundingKernel | None = None,
    ):
        self.kv_heads, self.device, layers = kv_heads, device, tuple(layers)
        self.latent = latent
        self.most_slots = most_slots  # bound of the reserve of slots
        self.longest_response: int | None = None  # bound of the reserve of length; tokens
        plain = partial(Slots, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
        tiled = partial(TiledSlots, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
        self.prompts = plain()
        self.responses = plain() if tile_step is None else tiled(step=tile_step)
        self._rounded = None if rounding is None else RoundedPrompts(self.prompts, rounding)
        self.states = States()  # of layers that have no keys and values
        self._parts: list[tuple[int, int, int, int]] | None = None
        self._copies: list[tuple[int, int, int]] = []
        self.split = 0  # tokens of the announced prefill before its copies are made
        self._rows: dict[int, Tensor] = {}  # by their number: slots and lengths of the rows of a pass

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        most_slots: int | None = None,
        tile_step: int | None = None,
        rounding: RoundingKernel | None = None,
    ) -> KeyValueCache:
        """Create a cache with the sizes of ``model``."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        latent = has_latents(config)
        if latent:
            width = config.kv_lora_rank + config.qk_rope_head_dim
        return cls(
            layers=layers_with_keys(config),
            kv_heads=1 if latent else getattr(config, "num_key_value_heads", None) or heads,
            head_dim=width,
            latent=latent,
            dtype=model.dtype,
            device=model.device,
            most_slots=most_slots,
            tile_step=tile_step,
            rounding=rounding,
        )

    def prefilling(
        self,
        parts: Sequence[tuple[int, int, int, int]],
        copies: Sequence[tuple[int, int, int]] = (),
        split: int | None = None,
    ) -> None:
        """Announce a pass over packed prompts: each part is (start, end, slot, known), for tokens start to end of its row, whose
        keys and values are written to that prompt slot, after the ``known`` tokens that it already holds.

        In every layer the parts from token ``split`` of the row on (None: none) come after the copies: each is (source slot,
        target slot, tokens), for the first tokens of a prompt slot, as the parts before have written it.
        """
        if parts:
            slots = max(slot for _, _, slot, _ in parts) + 1
            longest = max(known + end - start for start, end, _, known in parts)
            self.prompts.make_room(slots, longest, most_slots=self.most_slots)
        self._parts, self._copies = list(parts), list(copies)
        for _, _, slot, known in parts:
            self._rewritten(slot, known)
        for _, slot, _ in copies:
            self._rewritten(slot)
        self.split = max((end for _, end, _, _ in parts), default=0) if split is None else split

    def make_copies(self, layer: int) -> None:
        """Make the announced copies in a layer."""
        keys, values = self.prompts.keys[layer], self.prompts.values[layer]
        for source, target, tokens in self._copies:
            keys[target, :, :, :tokens] = keys[source, :, :, :tokens]
            values[target, :, :tokens] = values[source, :, :tokens]

    @property
    def parts(self) -> Sequence[tuple[int, int, int, int]]:
        """The parts of the announced prefill."""
        assert self._parts is not None
        return self._parts

    def decoding(self, prompt_slots: Sequence[int], prompt_lens: Sequence[int], response_lens: Sequence[int]) -> None:
        """Announce a pass over one token for each of the first slots.

        Args, one per row: the slot of its prompt; that prompt's length; the number of cached tokens of the response, which is the
        position of the new token's keys and values.
        """
        rows = len(prompt_slots)
        longest = max(response_lens) + 1
        self.responses.make_room(rows, longest, most_slots=self.most_slots, longest=self.longest_response)
        self.responses.trim(longest)
        device = self.device
        self._parts = None
        numbers = torch.tensor([prompt_slots, prompt_lens, response_lens])
        if rows not in self._rows:
            self._rows[rows] = numbers.to(device)
        self.prompt_slots, self.prompt_lens, self.places = self._rows[rows].copy_(numbers)
        self._listed: tuple[Sequence[int], Sequence[int]] | None = prompt_slots, prompt_lens
        if self._rounded is not None:
            self._rounded.update(zip(prompt_slots, prompt_lens, strict=True))

    def rounded_prompts(self, layer: int) -> dict[str, int]:
        """Return the addresses of a layer's rounded keys and values and their scales, where there are any."""
        return {} if self._rounded is None else self._rounded.addresses[layer]

    def _rewritten(self, slot: int, after: int = 0) -> None:
        if self._rounded is not None:
            self._rounded.forget(slot, after)

    @property
    def decodes(self) -> bool:
        """True when tokens of responses are announced, and not a prefill."""
        return self._parts is None

    def move_response(self, source: int, target: int, length: int) -> None:
        """Copy a response with ``length`` cached tokens over another slot."""
        self.responses.move(source, target, length)
        if length:
            self.states.move("response", source, target)

    def move_prompt(self, source: int, target: int, length: int) -> None:
        """Copy a prompt of ``length`` tokens over another slot."""
        self.prompts.move(source, target, length)
        self._rewritten(target)
        self.states.move("prompt", source, target)

    @property
    def moves(self) -> int:
        """Number of times that its tensors have moved: between two moves those of an equal number of rows stay where they are."""
        return self.prompts.moves + self.responses.moves

    @property
    def order(self) -> Tensor:
        """The announced rows by their prompts, [rows] int64."""
        self._arrange()
        return self._rows_by_prompt

    def _arrange(self) -> None:
        """Make the indices by which torch's operations, unlike kernels, read and write the announced rows."""
        if self._listed is None:
            return
        (prompt_slots, prompt_lens), self._listed = self._listed, None
        rows, device = len(prompt_slots), self.places.device
        # Flat indices of these positions: keys as one line of numbers, values as one line of vectors.
        kv_dim, room = self.kv_heads * self.responses.head_dim, self.responses.length
        self._row_numbers = torch.arange(rows, device=device)
        firsts = torch.arange(rows * kv_dim, device=device).view(rows, kv_dim) * room
        self._key_places = (firsts + self.places[:, None]).view(-1)
        firsts = torch.arange(rows * self.kv_heads, device=device).view(rows, self.kv_heads) * room
        self._value_places = (firsts + self.places[:, None]).view(-1)
        # The prompt slots are not trimmed: longer prompts may be held whose responses have not begun yet.
        seen, room = rounded_up(max(prompt_lens)), self.prompts.length
        self._visible = (seen if seen < (1 - LENGTH_UNUSED) * room else room, self.responses.length)
        self._masks: dict[int | None, Tensor] = {}
        # Rows by prompt: one line per prompt, padded with row 0 where it has fewer samples than another.
        self._prompts = max(prompt_slots) + 1
        lines: list[list[int]] = [[] for _ in range(self._prompts)]
        for row, slot in enumerate(prompt_slots):
            lines[slot].append(row)
        self._per_prompt = max(len(line) for line in lines)
        self._rows_by_prompt = torch.tensor([row for line in lines for row in line], device=device)
        order = [row for line in lines for row in line + [0] * (self._per_prompt - len(line))]
        back = [0] * rows
        for slot, line in enumerate(lines):
            for number, row in enumerate(line):
                back[row] = slot * self._per_prompt + number
        in_order = order == list(range(rows))  # the usual case: no rearrangement
        self._order = None if in_order else torch.tensor(order, device=device)
        self._back = None if in_order else torch.tensor(back, device=device)

    def get_seq_length(self) -> int:
        """Return 0: a model asks for it to make positions or masks, and is given positions and needs no mask here."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values, [1, kv_heads, N, head_dim] when prefilling, [rows, kv_heads, 1, head_dim] when
        decoding. When decoding they are returned unchanged: ``attend`` reads the past. When prefilling, the known tokens of the
        parts are appended in their order, as models.packed_attention.continued_layout expects.

        Models with latent attention give latents and rotated keys instead, [., 1, N, .] each, and get such.
        """
        given, rotated = (key, value), value.shape[3]
        if self.latent:
            key, value = stored(key, value)
        if self._parts is None:
            self.write(layer, key[:, :, 0], value[:, :, 0])
            return given
        keys, values = self.prompts.keys[layer], self.prompts.values[layer]
        all_keys, all_values = [key], [value]
        copied = False
        for start, end, slot, known in self._parts:
            if start >= self.split and not copied:
                self.make_copies(layer)
                copied = True
            length = known + end - start
            keys[slot, :, :, known:length] = key[0, :, start:end].transpose(1, 2)
            values[slot, :, known:length] = value[0, :, start:end]
            if known:
                all_keys.append(keys[slot, :, :, :known].transpose(1, 2)[None])
                all_values.append(values[slot, :, :known][None])
        joined = torch.cat(all_keys, dim=2)
        return (joined[..., rotated:], joined[..., :rotated]) if self.latent else (joined, torch.cat(all_values, dim=2))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the new token of every row. Args: key, value [rows, kv_heads, head_dim]."""
        self._arrange()
        keys, values = self.responses.keys[layer], self.responses.values[layer]
        if key.numel() > FEW_NUMBERS:
            keys.permute(0, 3, 1, 2).index_put_((self._row_numbers, self.places), key)
            values.transpose(1, 2).index_put_((self._row_numbers, self.places), value)
            return
        keys.view(-1).index_copy_(0, self._key_places, key.reshape(-1))
        values.view(-1, values.shape[3]).index_copy_(0, self._value_places, value.reshape(-1, values.shape[3]))

    def take(self, prompt_slot: int, prompt_len: int, slot: int, length: int) -> Past:
        """Copy a prompt and the first ``length`` tokens of its response."""
        layers = {}
        for layer in self.prompts.keys:
            parts = [self.prompts.read(layer, prompt_slot, prompt_len)]
            if length:
                parts.append(self.responses.read(layer, slot, length))
            keys = torch.cat([of_keys for of_keys, _ in parts], dim=2)
            values = torch.cat([of_values for _, of_values in parts], dim=1)
            layers[layer] = keys, values
        states = self.states.take("response", slot) if length else self.states.take("prompt", prompt_slot)
        return Past(layers, states)

    def put(self, past: Past, prompt_slot: int, length: int) -> None:
        """Copy the first ``length`` tokens of a past into a prompt slot: all of them, where there are states."""
        self.prompts.make_room(prompt_slot + 1, length, most_slots=self.most_slots)
        self.states.put_back("prompt", prompt_slot, past.states)
        self._rewritten(prompt_slot)
        for layer, (keys, values) in past.layers.items():
            self.prompts.keys[layer][prompt_slot, :, :, :length] = keys[:, :, :length]
            self.prompts.values[layer][prompt_slot, :, :length] = values[:, :length]

    def attend(self, layer: int, query: Tensor, settings: AttentionSettings) -> Tensor:
        """Compute attention of one new token per row over its prompt and its response so far, itself included.

        One softmax over both parts, in float32.

        Args: query [rows, heads, head_dim], heads a multiple of kv_heads. Returns: [rows, heads, head_dim].
        """
        self._arrange()
        scaling, window, softcap, sinks = settings
        rows, heads, dim = query.shape
        prompt_len, response_len = self._visible
        kv, slots = self.kv_heads, self._prompts
        prompt_keys = self.prompts.keys[layer][:slots].view(slots * kv, dim, -1)[:, :, :prompt_len]
        prompt_values = self.prompts.values[layer][:slots].view(slots * kv, -1, dim)[:, :prompt_len]
        keys = self.responses.keys[layer][:rows].view(rows * kv, dim, -1)[:, :, :response_len]
        values = self.responses.values[layer][:rows].view(rows * kv, -1, dim)[:, :response_len]
        query = query.contiguous()
        to_prompt = self._by_row(torch.bmm(self._by_prompt(query), prompt_keys), rows)
        to_response = torch.bmm(query.view(rows * kv, heads // kv, dim), keys).view(rows, heads, response_len)
        scores = torch.cat([to_prompt, to_response], dim=2)
        if softcap is None:
            masked = torch.add(self._mask(window), scores, alpha=scaling)
        else:
            masked = torch.add(self._mask(window), (scores.float() * (scaling / softcap)).tanh_(), alpha=softcap)
        weights = masked.softmax(dim=2)
        if sinks is not None:
            weights *= (masked.logsumexp(dim=2, keepdim=True) - sinks.to(weights.dtype)[:, None]).sigmoid_()
        weights = weights.to(query.dtype)
        of_prompt, of_response = weights.split([prompt_len, response_len], dim=2)
        output = torch.bmm(of_response.reshape(rows * kv, heads // kv, response_len), values).view(rows, heads, dim)
        return output + self._by_row(torch.bmm(self._by_prompt(of_prompt), prompt_values), rows)

    def _by_prompt(self, rows: Tensor) -> Tensor:
        """Reshape [rows, heads, X] -> [prompts * kv_heads, samples * heads / kv_heads, X]: one matrix per shared keys."""
        _, heads, width = rows.shape
        if self._order is not None:
            rows = rows.index_select(0, self._order)
        kv = self.kv_heads
        lines = rows.reshape(self._prompts, self._per_prompt, kv, heads // kv, width).transpose(1, 2)
        return lines.reshape(self._prompts * kv, -1, width)

    def _by_row(self, lines: Tensor, rows: int) -> Tensor:
        """Reverse ``_by_prompt``: [prompts * kv_heads, samples * heads / kv_heads, X] -> [rows, heads, X]."""
        kv, width = self.kv_heads, lines.shape[2]
        found = lines.view(self._prompts, kv, self._per_prompt, -1, width).transpose(1, 2)
        found = found.reshape(self._prompts * self._per_prompt, -1, width)
        return found if self._back is None else found.index_select(0, self._back)

    def _mask(self, window: int | None) -> Tensor:
        """Return 0 for positions that a row sees and -inf elsewhere, [rows, 1, visible prompt + visible response] float32."""
        if window not in self._masks:
            prompt_len, response_len = self._visible
            device = self.places.device
            positions = torch.arange(prompt_len, device=device)
            in_prompt = positions < self.prompt_lens[:, None]
            places = torch.arange(response_len, device=device)
            in_response = places <= self.places[:, None]
            if window is not None:
                oldest = self.places[:, None] - window + 1  # counted from the start of the response
                in_prompt = in_prompt & (positions - self.prompt_lens[:, None] >= oldest)
                in_response = in_response & (places >= oldest)
            visible = torch.cat([in_prompt, in_response], dim=1)
            self._masks[window] = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)[
                :, None
            ]
        return self._masks[window]
