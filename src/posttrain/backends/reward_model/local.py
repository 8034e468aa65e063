"""The engine of a reward model in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.torch_training.sharding import Sharding
from posttrain.models.loading import positions_of
from posttrain.models.packed_attention import packed_layout
from posttrain.models.value_head import token_values
from posttrain.models.vision import model_inputs
from posttrain.processes.limits import EXCEPTION
from posttrain.records.images import PlacedImages, PromptImages
from posttrain.records.trajectories import Invalid, Outcome, Reward, Trajectory, TrajectoryGroup
from posttrain.rewards.score import NOT_FINITE

TOO_LONG = "too_long"  # value of Invalid.reason: the conversation has more tokens than the model has positions


class LocalRewardModel:
    """See interfaces.reward.RewardModel: the model's number at the last token of prompt and response.

    Args: ``tokenizer`` re-tokenises the conversation for the reward model; None gives it the policy's token ids.
        ``max_tokens``: a longer conversation is cut as ``truncation`` says; None does not cut. ``device`` computes, None is the
        model's own; with rests_on_cpu the weights are there only while a batch is scored. A model sharded over several processes
        runs equally many passes in each, whatever they have to score.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        sequences_per_micro_batch: int,
        max_tokens: int | None = None,
        truncation: str = "left",
        device: torch.device | None = None,
        rests_on_cpu: bool = False,
        sharding: Sharding | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.sequences_per_micro_batch = sequences_per_micro_batch
        self.max_tokens = max_tokens
        self.truncation = truncation
        self.sharding = sharding or Sharding()
        self._device = device or model.device
        self._rests = rests_on_cpu
        self._rest()
        self._positions = positions_of(model.config.get_text_config())

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        rows = [(group, trajectory) for group in groups for trajectory in group.trajectories]
        outcomes: list[Outcome | None] = [None] * len(rows)
        conversations: dict[int, Conversation] = {}
        for row, (group, trajectory) in enumerate(rows):
            found = self._conversation(group, trajectory)
            if isinstance(found, Invalid):
                outcomes[row] = found
            else:
                conversations[row] = found
        # Similar lengths are batched, so that attention pads little; other rows change a score only by rounding.
        ordered = sorted(conversations, key=lambda row: (len(conversations[row].ids), row))
        size = self.sequences_per_micro_batch
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        if self._rests:
            _move(self.model, self._device)
        for part in parts:
            for row, score in zip(part, self._scores([conversations[row] for row in part]), strict=True):
                outcomes[row] = Reward(score) if math.isfinite(score) else Invalid(NOT_FINITE, f"model: scored {score}")
        for _ in range(self.sharding.most(len(parts)) - len(parts)):
            self._scores([Conversation([0])])  # other processes gather this one's weights
        self.sharding.weights_changed(self.model)
        self._rest()
        scored = iter(outcome for outcome in outcomes if outcome is not None)
        return [tuple(next(scored) for _ in group.trajectories) for group in groups]

    def _rest(self) -> None:
        if self._rests:
            _move(self.model, torch.device("cpu"))

    def _cut(self, ids: list[int], *, has_images: bool) -> list[int] | Invalid:
        """Return the tokens that fit, of a conversation that may have more."""
        most = self.max_tokens
        if not most or len(ids) <= most:
            return ids
        if has_images:
            what = f"model: {len(ids)} tokens, and reward.model.max_tokens is {most}; one with images is not cut"
            return Invalid(TOO_LONG, what)
        if self.truncation == "error":
            return Invalid(TOO_LONG, f"model: {len(ids)} tokens, and reward.model.max_tokens is {most}")
        if self.truncation == "right":
            return ids[:most]
        end = most // 2 if self.truncation == "middle" else most
        return [*ids[: most - end], *ids[-end:]] if end else ids[:most]

    def _conversation(self, group: TrajectoryGroup, trajectory: Trajectory) -> Conversation | Invalid:
        """Return prompt and response as the model reads them."""
        images = trajectory.images or group.prompt.images
        if self.tokenizer is None:
            ids = [*group.prompt.token_ids, *trajectory.token_ids]
        else:
            messages = [*map(dict, group.prompt.messages), {"role": "assistant", "content": trajectory.text}]
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
            except Exception as error:  # noqa: BLE001 - a template is a program from the model's folder and may fail in any way
                return Invalid(EXCEPTION, f"model: its chat template refuses it: {type(error).__name__}: {error}"[:500])
            ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        cut = self._cut(ids, has_images=images is not None)
        if isinstance(cut, Invalid):
            return cut
        ids = cut
        if len(ids) > self._positions:
            what = f"model: {len(ids)} tokens, and it has {self._positions:.0f} positions; reward.model.max_tokens would cut"
            return Invalid(TOO_LONG, what)
        if not ids:
            return Invalid(EXCEPTION, "model: its chat template makes an empty text of it")
        return Conversation(ids, len(group.prompt.token_ids), images)

    @torch.no_grad()
    def _scores(self, conversations: Sequence[Conversation]) -> list[float]:
        device = self._device
        lengths = torch.tensor([len(each.ids) for each in conversations])
        ends = lengths.cumsum(0)
        tokens = torch.tensor([token for each in conversations for token in each.ids], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
        placed = [
            PlacedImages(
                images=each.images,
                start=end - len(each.ids),
                prompt=len(each.ids) if each.images.beyond_prompt else each.prompt,
                end=end,
            )
            for each, end in zip(conversations, ends.tolist(), strict=True)
            if each.images is not None
        ]

        def values() -> Tensor:
            return token_values(
                self.model,
                (ends - 1).to(device),
                **model_inputs(self.model, tokens, positions, placed),
                attention_layout=packed_layout(lengths.tolist(), device),
                use_cache=False,
            )

        return [float(score) for score in self.sharding.forward(self.model, values)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and its response as the model reads them."""

    ids: Sequence[int]
    prompt: int = 0  # tokens of the prompt, where the model reads the policy's
    images: PromptImages | None = None


def _move(model: nn.Module, device: torch.device) -> None:
    model.to(device)
