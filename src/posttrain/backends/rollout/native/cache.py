"""Keys and values of the sequences being decoded: every prompt once, every response in a slot of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

LENGTH_STEP = 16  # visible lengths are rounded up to it, so that the matrix library meets few shapes


class KeyValueCache:
    """Preallocated keys and values, per layer: of prompts ``[prompt_slots, kv_heads, ...]`` and of responses ``[slots, ...]``.

    All samples of a prompt read the one copy of its keys and values, as rows of one matrix product. Keys are stored
    transposed, ``[head_dim, length]``: queries of one token times such keys is the fastest product a CPU has for decoding.
    Active slots come first, in both parts; the caller moves the last one into a gap.

    Stands in for a transformers cache: attention layers call ``update``. Which rows a forward pass holds is said beforehand,
    by ``prefilling`` or ``decoding``.
    """

    def __init__(
        self,
        *,
        layers: int,
        prompt_slots: int,
        slots: int,
        kv_heads: int,
        max_prompt_len: int,
        max_response_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.slots, self.prompt_slots, self.kv_heads = slots, prompt_slots, kv_heads
        self.prompt_len, self.response_len = _round_up(max_prompt_len), _round_up(max_response_len)

        def new(count: int, *shape: int) -> list[Tensor]:
            return [torch.zeros(count, kv_heads, *shape, dtype=dtype, device=device) for _ in range(layers)]

        self.prompt_keys = new(prompt_slots, head_dim, self.prompt_len)
        self.prompt_values = new(prompt_slots, self.prompt_len, head_dim)
        self.keys = new(slots, head_dim, self.response_len)
        self.values = new(slots, self.response_len, head_dim)
        self._parts: list[tuple[int, int, int]] | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, *, prompt_slots: int, slots: int, max_prompt_len: int, max_response_len: int
    ) -> KeyValueCache:
        """A cache for what ``model`` computes."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            prompt_slots=prompt_slots,
            slots=slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            max_prompt_len=max_prompt_len,
            max_response_len=max_response_len,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            device=model.device,
        )

    def prefilling(self, parts: list[tuple[int, int, int]]) -> None:
        """The next pass holds packed prompts: tokens start to end of its row go to the prompt slot named."""
        self._parts = parts

    def decoding(self, prompt_slots: Sequence[int], prompt_lens: Sequence[int], response_lens: Sequence[int]) -> None:
        """The next pass holds one token for each of the first so many slots.

        Args, one per row: the slot of its prompt; that prompt's length; how many tokens of the response are cached already,
        which is where the keys and values of the new one go.
        """
        device = self.keys[0].device
        rows = len(prompt_slots)
        self._parts = None
        self._rows = torch.arange(rows, device=device)
        self._places = torch.tensor(response_lens, device=device)
        self._visible = (_round_up(max(prompt_lens)), _round_up(max(response_lens) + 1))
        self._prompt_lens = torch.tensor(prompt_lens, device=device)
        self._masks: dict[int | None, Tensor] = {}
        # Rows by prompt: one line per prompt, filled up with row 0 where it has fewer samples than another.
        self._prompts = max(prompt_slots) + 1
        lines: list[list[int]] = [[] for _ in range(self._prompts)]
        for row, slot in enumerate(prompt_slots):
            lines[slot].append(row)
        self._per_prompt = max(len(line) for line in lines)
        order = [row for line in lines for row in line + [0] * (self._per_prompt - len(line))]
        back = [0] * rows
        for slot, line in enumerate(lines):
            for number, row in enumerate(line):
                back[row] = slot * self._per_prompt + number
        in_order = order == list(range(rows))  # the usual case: nothing to rearrange
        self._order = None if in_order else torch.tensor(order, device=device)
        self._back = None if in_order else torch.tensor(back, device=device)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store what a layer computed, [1, kv_heads, N, head_dim] when prefilling, [rows, kv_heads, 1, head_dim] when
        decoding. Returned as it is: a prompt sees only itself, and ``attend`` knows where a decoded token's past is."""
        if self._parts is None:
            self.write(layer, key[:, :, 0], value[:, :, 0])
            return key, value
        for start, end, slot in self._parts:
            self.prompt_keys[layer][slot, :, :, : end - start] = key[0, :, start:end].transpose(1, 2)
            self.prompt_values[layer][slot, :, : end - start] = value[0, :, start:end]
        return key, value

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the new token of every row. key, value [rows, kv_heads, head_dim]"""
        self.keys[layer][self._rows, :, :, self._places] = key
        self.values[layer][self._rows, :, self._places] = value

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None = None) -> Tensor:
        """Attention of one new token per row to its prompt and to its response so far, itself included.

        One softmax over both parts, in float32. ``window``: only so many of the latest positions are seen.

        Args: query [rows, heads, head_dim], heads a multiple of kv_heads. Returns: [rows, heads, head_dim].
        """
        rows, heads, dim = query.shape
        prompt_len, response_len = self._visible
        kv, slots = self.kv_heads, self._prompts
        prompt_keys = self.prompt_keys[layer][:slots].view(slots * kv, dim, -1)[:, :, :prompt_len]
        prompt_values = self.prompt_values[layer][:slots].view(slots * kv, -1, dim)[:, :prompt_len]
        keys = self.keys[layer][:rows].view(rows * kv, dim, -1)[:, :, :response_len]
        values = self.values[layer][:rows].view(rows * kv, -1, dim)[:, :response_len]
        query = query.contiguous()
        to_prompt = self._by_row(torch.bmm(self._by_prompt(query), prompt_keys), rows)
        to_response = torch.bmm(query.view(rows * kv, heads // kv, dim), keys).view(rows, heads, response_len)
        scores = torch.cat([to_prompt, to_response], dim=2)
        weights = torch.add(self._mask(window), scores, alpha=scaling).softmax(dim=2).to(query.dtype)
        of_prompt, of_response = weights.split([prompt_len, response_len], dim=2)
        output = torch.bmm(of_response.reshape(rows * kv, heads // kv, response_len), values).view(rows, heads, dim)
        return output + self._by_row(torch.bmm(self._by_prompt(of_prompt), prompt_values), rows)

    def _by_prompt(self, rows: Tensor) -> Tensor:
        """[rows, heads, X] -> [prompts * kv_heads, samples * heads / kv_heads, X]: what meets the same keys, together"""
        _, heads, width = rows.shape
        if self._order is not None:
            rows = rows.index_select(0, self._order)
        kv = self.kv_heads
        lines = rows.reshape(self._prompts, self._per_prompt, kv, heads // kv, width).transpose(1, 2)
        return lines.reshape(self._prompts * kv, -1, width)

    def _by_row(self, lines: Tensor, rows: int) -> Tensor:
        """The way back: [prompts * kv_heads, samples * heads / kv_heads, X] -> [rows, heads, X]"""
        kv, width = self.kv_heads, lines.shape[2]
        found = lines.view(self._prompts, kv, self._per_prompt, -1, width).transpose(1, 2)
        found = found.reshape(self._prompts * self._per_prompt, -1, width)
        return found if self._back is None else found.index_select(0, self._back)

    def _mask(self, window: int | None) -> Tensor:
        """0 where a row may look and -inf elsewhere, [rows, 1, visible prompt + visible response] float32."""
        if window not in self._masks:
            prompt_len, response_len = self._visible
            positions = torch.arange(prompt_len, device=self._rows.device)
            in_prompt = positions < self._prompt_lens[:, None]
            places = torch.arange(response_len, device=self._rows.device)
            in_response = places <= self._places[:, None]
            if window is not None:
                oldest = self._places[:, None] - window + 1  # counted from the start of the response
                in_prompt = in_prompt & (positions - self._prompt_lens[:, None] >= oldest)
                in_response = in_response & (places >= oldest)
            visible = torch.cat([in_prompt, in_response], dim=1)
            self._masks[window] = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)[
                :, None
            ]
        return self._masks[window]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one response slot over another."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def move_prompt(self, source: int, target: int, length: int) -> None:
        """Copy a prompt of ``length`` tokens from one prompt slot over another."""
        for keys, values in zip(self.prompt_keys, self.prompt_values, strict=True):
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
