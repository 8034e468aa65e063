"""Text games as environments: the model's text becomes an action, the game's answer a message.

A game knows its rules and no messages; ``TextGame`` turns it into an environment, in the manner of ROLL's trajectory
environments: an instruction, then in every turn an observation in a template, and an answer in a pattern. For a game of
your own write a function with this line, and name it as the environment (``my_game.py:build``):

    def build(spec, **wording): return TextGame(spec, MyGame(), **wording)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from posttrain.errors import ConfigError, Problem, did_you_mean
from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep, Message

ANSWER = r"<answer>(.*?)</answer>"
_PICTURE = "\ufffc"  # stands for the picture while a template is filled
_MARKS = re.compile(r"<\|im_start\|>|<\|im_end\|>")  # removed from an answer before the action is matched, as in ROLL
FIELDS = (
    *("observation", "turn_idx", "actions_left", "max_response_length", "suffix", "format_template"),
    # Other names of ROLL's for the observation, and what the templates of its step manager hold.
    *("state", "current_observation", "env_instruction", "history", "history_length", "step_count", "current_step"),
)
# ROLL's words behind an action in {history} that was none.
INVALID = (
    "(IMPORTANT TIPS: this action is not valid, your new response *must* strictly adhere to the format according to env "
    "instructions.)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of an action."""

    seen: str
    reward: float
    done: bool = False
    success: bool = False
    effective: bool = True  # the action changed the state


class Game(Protocol):
    """The rules of a game. ``begin`` is called first, and again for another round."""

    @property
    def instruction(self) -> str:
        """The task and its actions, for the model."""
        ...

    @property
    def actions(self) -> Sequence[str]:
        """Names of the actions, as the model writes them; empty where any text may be one."""
        ...

    def begin(self, seed: int) -> str:
        """Start a new round, equal for equal seeds. Returns: the first observation."""
        ...

    def act(self, action: str | None) -> Played:
        """Take one of ``actions``, or any text where they are free; None, for an answer that names none, changes nothing but
        counts as a turn."""
        ...

    def state(self) -> str:
        """A text that is equal for equal states (GiGPO compares the actions taken in one)."""
        ...


@runtime_checkable
class DrawnGame(Protocol):
    """A game that can also show its state as a picture."""

    @property
    def picture_instruction(self) -> str:
        """The task, its actions and the signs in pictures, for the model."""
        ...

    def picture(self, pixels_per_cell: int) -> str:
        """Draw the state. Returns: an image as a data URL, equal for equal states."""
        ...


class TextGame:
    """An environment that plays a game.

    The first match of ``action_pattern`` in an answer captures the action (two groups: a thought and the action); surrounding
    spaces and case are ignored. An answer without an action leaves the game unchanged, and adds ``format_penalty`` to the
    turn's reward.

    Args: ``max_turns`` ends the episode, and so does the run's limit; the default of both is ``usual_turns``;
        ``instruction`` None is the game's own; ``template`` renders the message of an observation, with the names in FIELDS in
        braces (``turn_idx`` counts from ``first_turn``); ``system`` None has no system message; ``action_words``, the model's
        word for an action, where that is not its name; ``max_response_tokens`` and ``answer_format`` (``{format_template}``)
        are only for the template; ``reward_template`` renders the last turn's ``{reward}``, before the observation that
        follows it; ``turns_apart`` begins a conversation of its own with every turn, in which ``{history}`` holds the last
        ``history_turns`` turns; ``pictures`` shows every observation as an image, in place of its text, to a vision model,
        with ``pixels_per_cell``.
    Raises: ConfigError for a pattern, a template or words that cannot be used.
    """

    def __init__(
        self,
        spec: EnvSpec,
        game: Game,
        *,
        usual_turns: int = 10,
        max_turns: int | None = None,
        instruction: str | None = None,
        template: str = "{observation}",
        system: str | None = None,
        action_pattern: str = ANSWER,
        action_words: Mapping[str, str] | None = None,
        format_penalty: float = 0.0,
        max_response_tokens: int | None = None,
        reward_template: str = "",
        answer_format: str = "",
        first_turn: int = 1,
        history_turns: int = 0,
        turns_apart: bool = False,
        pictures: bool = False,
        pixels_per_cell: int = 32,
    ):
        self._game = game
        self._max_turns = min((turns for turns in (max_turns, spec.max_turns) if turns), default=usual_turns)
        self._drawn = _drawn(game, template, pixels_per_cell) if pictures else None
        self._pixels = pixels_per_cell
        own = self._drawn.picture_instruction if self._drawn else game.instruction
        self._instruction = own if instruction is None else instruction
        self._template = template
        self._system = system
        self._pattern = _pattern(action_pattern)
        self._by_word = _by_word(game.actions, action_words or {})
        self._penalty = format_penalty
        self._reward_template = reward_template
        self._first_turn = first_turn
        self._history_turns = history_turns
        self._apart = turns_apart
        self._played: list[str] = []  # the turns so far, for {history}
        self._seen = ""
        self._seed = 0
        self._answers: list[str] = []
        self._fields: dict[str, Any] = {
            "max_response_length": max_response_tokens or "",
            "suffix": "",
            "format_template": answer_format,
            "env_instruction": self._instruction,
        }
        self._turns = self._valid = self._effective = 0
        self._success = False
        self._message("")  # report invalid templates now
        self._rewarded(0.0)

    def reset(self, seed: int) -> EnvStart:
        self._seed = seed
        self._seen = self._shown(self._game.begin(seed))
        instruction = "" if self._apart else self._instruction  # the template has a place for it
        first = "\n".join(text for text in (instruction, self._message(self._seen)) if text)
        return EnvStart(messages=self._opening(first), state_key=self._game.state())

    def state(self) -> Any:
        """Return the seed and the answers so far: games are equal for equal ones."""
        return {"seed": self._seed, "answers": list(self._answers)}

    def restore(self, state: Any) -> None:
        self.reset(state["seed"])
        for answer in state["answers"]:
            self.step(answer)

    def step(self, action: str) -> EnvStep:
        self._answers.append(action)
        chosen = self._action(action)
        played = self._game.act(chosen)
        self._turns += 1
        self._valid += chosen is not None
        self._effective += played.effective
        self._success = played.success
        done = played.done or self._turns >= self._max_turns
        stop = "solved" if played.success else "lost" if played.done else "max_turns"
        taken = f"{action}{INVALID}" if chosen is None else self._matched(action)
        before = "a picture" if self._drawn else self._seen
        self._played.append(f"(step: {self._turns}, state: {before}, action: {taken}, reward: {played.reward:g})")
        self._seen = self._shown(played.seen)
        text = self._message(self._seen)
        said = f"{self._rewarded(played.reward)}{text}"
        return EnvStep(
            messages=[{"role": "user", "content": self._content(said)}],
            conversation=self._opening(text) if self._apart and not done else None,
            reward=played.reward + (self._penalty if chosen is None else 0.0),
            done=done,
            stop=stop if done else "",
            state_key=self._game.state(),
        )

    def close(self) -> Mapping[str, float]:
        """Return success, the number of turns, the shares of turns with a valid and with an effective action, and the mean format
        penalty."""
        turns = max(self._turns, 1)
        return {
            "success": float(self._success),
            "num_actions": float(self._turns),
            "action_is_valid": self._valid / turns,
            "action_is_effective": self._effective / turns,
            "format_penalty": self._penalty * (self._turns - self._valid) / turns,
        }

    def _opening(self, text: str) -> list[Message]:
        """The messages that a conversation begins with."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self._content(text)}]

    def _shown(self, seen: str) -> str:
        """The observation in the message: a text, or the sign in the place of a picture."""
        return _PICTURE if self._drawn else seen

    def _content(self, text: str) -> Any:
        """The content of a message: a text, or texts around the picture."""
        if self._drawn is None:
            return text
        before, _, behind = text.partition(_PICTURE)
        picture = {"type": "image", "image": self._drawn.picture(self._pixels)}
        texts = [{"type": "text", "text": part} for part in (before, behind)]
        return [part for part in (texts[0], picture, texts[1]) if part.get("text") != ""]

    def _action(self, reply: str) -> str | None:
        matched = self._matched(reply)
        return (matched or None) if not self._game.actions else self._by_word.get(matched.casefold())

    def _matched(self, reply: str) -> str:
        """The text that the pattern takes from an answer; "" without a match."""
        match = self._pattern.search(_MARKS.sub("", reply))
        return (match.groups()[-1] or "").strip() if match else ""

    def _rewarded(self, reward: float) -> str:
        try:
            return self._reward_template.format(reward=reward)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            what = f"the reward_template cannot be filled: {error}"
            raise ConfigError(Problem(what, fix="its field is {reward}", field="reward_template")) from None

    def _message(self, seen: str) -> str:
        history = self._played[-self._history_turns :] if self._history_turns else []
        fields = self._fields | {
            **dict.fromkeys(("observation", "state", "current_observation"), seen),
            "turn_idx": self._turns + self._first_turn,
            "step_count": self._turns,
            "current_step": self._turns + 1,
            "history": ", ".join(history),
            "history_length": len(history),
            "actions_left": self._max_turns - self._turns,
        }
        try:
            return self._template.format(**fields)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            fix = f"use the fields {', '.join(FIELDS)} in braces, and {{{{ and }}}} where braces are meant"
            raise ConfigError(
                Problem(f"the template of a turn cannot be filled: {error}", fix=fix, field="template")
            ) from None


def _drawn(game: Game, template: str, pixels_per_cell: int) -> DrawnGame:
    """Return the game as one that draws. Raises: ConfigError where it cannot, or a turn has no place for the picture."""
    if not isinstance(game, DrawnGame):
        what = "this game has no pictures"
        raise ConfigError(Problem(what, fix="leave pictures out", field="pictures"))
    places = sum(template.count(f"{{{name}}}") for name in ("observation", "state", "current_observation"))
    if places != 1:
        what = f"the template of a turn has {places} places for its picture"
        raise ConfigError(Problem(what, fix="write {observation} once", field="template"))
    if not 4 <= pixels_per_cell <= 512:
        what = f"a cell of {pixels_per_cell} pixels cannot be drawn"
        raise ConfigError(Problem(what, fix="use 4 to 512 pixels", field="pixels_per_cell"))
    return game


def _by_word(actions: Sequence[str], words: Mapping[str, str]) -> dict[str, str]:
    """Return the model's word, in lower case -> the action."""
    for action in words:
        if action not in actions:
            raise ConfigError(
                Problem(
                    f"action_words has a word for {action!r}, which is no action (known: {', '.join(actions[:20])})",
                    fix=did_you_mean(action, list(actions), listed=True),
                    field=f"action_words.{action}",
                )
            )
    return {words.get(action, action).casefold(): action for action in actions}


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        what = f"the action pattern {text!r} is no regular expression: {error}"
        raise ConfigError(Problem(what, fix=f"use one such as {ANSWER}", field="action_pattern")) from None
    if pattern.groups not in (1, 2):
        what = f"the action pattern {text!r} has {pattern.groups} groups"
        fix = f"use one group around the action, such as {ANSWER}, or two, of a thought and the action"
        raise ConfigError(Problem(what, fix=fix, field="action_pattern"))
    return pattern
