"""Plan of a prefill: the tokens of each prompt that are computed, those that are copied from another prompt, and their places.

Continued responses begin with the prompt of their group, which is computed once for all of them: their tokens after it follow
in the same pass, each over a copy of its keys and values. The row of a pass therefore has two stretches: heads, which read
nothing but what their own slots hold, and rests, before which the copies are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from posttrain.backends.rollout.native.responses import PromptState
from posttrain.records.images import PlacedImages


class Copy(NamedTuple):
    """The first tokens of a prompt slot, which begin another one, too."""

    source: int  # slot
    target: int  # slot
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Tokens of a prompt that lie side by side in the row."""

    prompt: PromptState
    slot: int
    known: int  # tokens before them, which the slot holds
    end: int  # of them, in the prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt.token_ids[self.known : self.end]

    @property
    def positions(self) -> range:
        return range(self.known + self.prompt.shift, self.end + self.prompt.shift)


@dataclass(slots=True)
class PrefillPlan:
    """The parts of a pass, in the order of its row: heads, then rests."""

    heads: list[PrefillPart] = field(default_factory=list)
    rests: list[PrefillPart] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)  # made after the heads and before the rests, layer by layer

    @property
    def split(self) -> int:
        """Tokens of the heads."""
        return sum(part.end - part.known for part in self.heads)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the row."""
        return [token for part in (*self.heads, *self.rests) for token in part.token_ids]

    @property
    def positions(self) -> list[int]:
        """The place of each token of the row in its sequence."""
        return [position for part in (*self.heads, *self.rests) for position in part.positions]

    def placed(self) -> Iterator[tuple[PrefillPart, int, int]]:
        """Yield every part with its begin and end in the row."""
        start = 0
        for part in (*self.heads, *self.rests):
            end = start + part.end - part.known
            yield part, start, end
            start = end


def plan_prefill(held: Sequence[PromptState], new: Sequence[tuple[PromptState, int]]) -> PrefillPlan:
    """Plan the pass that prefills new prompts into the slots after those of ``held``.

    Args: held, prompts in their slots, with keys and values of the present weights (but for those whose ``stem`` is 0); new,
        each with the number of its tokens that its slot holds already.
    """
    plan = PrefillPlan()
    sources: dict[tuple[int, ...], int] = {}  # slots, by the tokens that begin them
    for slot, prompt in enumerate(held):
        if prompt.stem:
            sources.setdefault(prompt.stem_tokens, slot)
    wanted = Counter(prompt.stem_tokens for prompt, reused in new if prompt.stem and not reused)
    for slot, (prompt, reused) in enumerate(new, start=len(held)):
        count, stem = len(prompt.token_ids), prompt.stem
        source = sources.get(prompt.stem_tokens) if stem and not reused else None
        if source is not None:
            known = min(stem, count - 1)  # the logits of the last token are needed
            plan.copies.append(Copy(source, slot, known))
            plan.rests.append(PrefillPart(prompt, slot, known, count))
            continue
        if stem and not reused and stem < count and wanted[prompt.stem_tokens] > 1:
            plan.heads.append(PrefillPart(prompt, slot, 0, stem))
            plan.rests.append(PrefillPart(prompt, slot, stem, count))
        else:
            plan.heads.append(PrefillPart(prompt, slot, reused, count))
        if stem:
            sources.setdefault(prompt.stem_tokens, slot)
    return plan


def images_of(plan: PrefillPlan) -> list[tuple[PromptState, PlacedImages]]:
    """Return the prompts of a plan whose images are computed, with the places of these in the row."""
    found = []
    for part, start, end in plan.placed():
        if part.prompt.images and not part.known:
            placed = PlacedImages(images=part.prompt.images, start=start, prompt=end - start, end=end)
            found.append((part.prompt, placed))
    return found


def shared_tokens(prompt: PromptState, stems: set[tuple[int, ...]]) -> int:
    """Count the tokens of a prompt that are copied when prompts with these stems are held or prefilled with it."""
    return min(prompt.stem, len(prompt.token_ids) - 1) if prompt.stem and prompt.stem_tokens in stems else 0


def experts_of_prompts(
    plan: PrefillPlan, held: Sequence[PromptState], recorded: NDArray[np.int16]
) -> dict[PromptState, NDArray[np.int16]]:
    """Return the experts of all tokens of every prompt of the plan; those with tokens whose experts were not kept are left out.

    Args: held, prompts by slot, with the new ones; recorded [tokens of the row, layers, chosen].
    """
    copies = {copy.target: copy for copy in plan.copies}
    found: dict[PromptState, NDArray[np.int16]] = {}
    for part, start, end in plan.placed():
        prompt, own = part.prompt, recorded[start:end]
        if not part.known:
            found[prompt] = own
        elif prompt in found:  # its head
            found[prompt] = np.concatenate([found[prompt], own])
        elif part.slot in copies:
            source = held[copies[part.slot].source]
            before = found.get(source, source.experts)
            if before is not None:
                found[prompt] = np.concatenate([before[: part.known], own])
    return found
