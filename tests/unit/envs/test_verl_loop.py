"""A fork of verl whose own class plays episodes: its loop runs as it is, and what was sampled is what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.environments.processes import ProcessHost
from posttrain.data.turns import TemplateTurns
from posttrain.envs.verl_loop.turns import Context
from posttrain.interfaces.env import EnvSpec
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.steps.play import play
from says import Says
from toy import ids, toy_tokenizer
from verl_fork import MAIN, PLAYER, TRAINER, passages, write_fork

pytestmark = pytest.mark.usefixtures("warm_children")
WHO = ({"role": "user", "content": "who"},)
PROMPT = "Uwho$\nA"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with passages() as address:
        yield address


@pytest.fixture(scope="module")
def host() -> Iterator[ProcessHost]:
    made = ProcessHost(1, 60.0, ["verl_loop"])
    yield made
    made.close()


@pytest.fixture
def played(tmp_path: Path, host: ProcessHost, url: str) -> Callable[..., Trajectory]:
    def run(sampler: Says, files: dict[str, str] | None = None, window: int = 500, **seeker: Any) -> Trajectory:
        fork = write_fork(tmp_path / "fork", **(files or {}))
        toy_tokenizer().save_pretrained(tmp_path / "model")
        config = {
            "seeker": {"turns": 2, "passage_tokens": 6, "url": url, "worth": 0.5, **seeker},
            "data": {"max_prompt_length": window},
            "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
        }
        settings = {
            "trainer": f"{fork}/verl/trainer/ppo/ray_trainer.py:RayPPOTrainer.fit",
            "folder": str(fork),
            "program": f"{fork}/verl/trainer/main_ppo.py",
            "model": {"path": str(tmp_path / "model")},
            "config": config,
        }
        row = {"data_source": "t", "ground_truth": {"target": ["about"]}, "index": 3}
        spec = EnvSpec(name="verl_loop", settings=settings, messages=WHO, row=row)
        rules = EpisodeRules(max_response_tokens=40, max_context_tokens=1000, max_turns=None)
        worlds = Worlds(host=host, writer=TemplateTurns(toy_tokenizer(), {}), rules=rules, spec_of=lambda _: spec)
        prompt = Prompt(prompt_id="p", token_ids=ids(PROMPT), text=PROMPT, data_source="t", messages=WHO)
        [group] = play(sampler, [prompt], SamplingParams(max_response_tokens=40), worlds)  # type: ignore[arg-type]
        [trajectory] = group.trajectories
        return trajectory

    return run


@pytest.fixture
def played_group(tmp_path: Path, host: ProcessHost) -> Callable[..., Sequence[Trajectory]]:
    def run(files: dict[str, str], **seeker: Any) -> Sequence[Trajectory]:
        fork = write_fork(tmp_path / "fork", **files)
        toy_tokenizer().save_pretrained(tmp_path / "model")
        settings = {
            "trainer": f"{fork}/verl/trainer/ppo/ray_trainer.py:RayPPOTrainer.fit",
            "folder": str(fork),
            "program": f"{fork}/verl/trainer/main_ppo.py",
            "model": {"path": str(tmp_path / "model")},
            "config": {
                "seeker": {"turns": 2, "passage_tokens": 6, "url": "", "worth": 0.5, **seeker},
                "data": {"max_prompt_length": 500},
                "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
            },
        }
        spec = EnvSpec(
            name="verl_loop", settings=settings, messages=WHO, row={"data_source": "t", "ground_truth": {"target": []}}
        )
        rules = EpisodeRules(max_response_tokens=40, max_context_tokens=1000, max_turns=None)
        worlds = Worlds(host=host, writer=TemplateTurns(toy_tokenizer(), {}), rules=rules, spec_of=lambda _: spec)
        prompt = Prompt(prompt_id="p", token_ids=ids(PROMPT), text=PROMPT, data_source="t", messages=WHO)
        sampling = SamplingParams(max_response_tokens=40, samples_per_prompt=3, step=5)
        [group] = play(Says(*["hm$"] * 9), [prompt], sampling, worlds)  # type: ignore[arg-type]
        assert not [each.failure for each in group.trajectories if each.failure]
        return group.trajectories

    return run


def marked(sample: Trajectory) -> tuple[str, str]:
    """A sample's response, and which of its tokens are trained."""
    return bytes(sample.token_ids).decode(), "".join("1" if trained else "0" for trained in sample.sampled_mask)


def test_an_episode_by_hand(played: Callable[..., Trajectory]) -> None:
    """Three turns of at most three: a search with text behind its end, which the class cuts; a meaningless one, whose end token
    it does not keep; an answer with text behind its end. The passage "[about cat]" is cut to 6 tokens."""
    sampler = Says("<find>cat</find>zz", "hm$", "<done>about</done>xx")
    trajectory = played(sampler)
    assert trajectory.failure == ""
    assert marked(trajectory) == (
        "<find>cat</find>[abouthm?<done>about</done>",
        "1" * 16 + "0" * 6 + "11" + "0" + "1" * 18,
    )
    # The log-probs of the tokens that stay, as the sampler gave them
    assert trajectory.logprobs[:16] == tuple(-0.5 - place for place in range(16))
    assert trajectory.logprobs[16:22] == (0.0,) * 6 and trajectory.logprobs[22:25] == (-0.5, -1.5, 0.0)
    assert [bytes(each.token_ids).decode() for each in sampler.asked] == [
        PROMPT,
        PROMPT + "<find>cat</find>[about",
        PROMPT + "<find>cat</find>[abouthm?",
    ]
    assert [(turn.start, turn.end, turn.observation) for turn in trajectory.turns] == [
        (0, 16, "[about"),
        (22, 24, "?"),
        (25, 43, ""),
    ]
    assert trajectory.env_reward == 0.5 and trajectory.env_stop == "ended"  # worth x (about is in the text)
    assert dict(trajectory.env_metrics)["num_actions"] == 3.0 and trajectory.prompt_token_ids is None


def test_an_answer_ends_the_episode_and_the_limit_of_turns_does(played: Callable[..., Trajectory]) -> None:
    """The class plays seeker.turns turns with searches and one without: its observation is dropped."""
    once = played(Says("<done>no</done>$"))
    assert once.turn_count == 1 and once.env_reward == 0.0
    often = played(Says(*["<find>a</find>"] * 3), turns=2)
    assert marked(often)[0] == "<find>a</find>[about<find>a</find>[about<find>a</find>"
    assert often.turn_count == 3
    assert played(Says("<find>a</find>", "<done>b</done>"), turns=1).turn_count == 2


def test_a_context_that_loses_its_beginning_is_a_sample_of_its_own(played: Callable[..., Trajectory]) -> None:
    """A window of 20 tokens drops the prompt and the search: the second turn reads the last 20."""
    trajectory = played(Says("<find>cat</find>", "<done>about</done>"), window=20)
    first, second = trajectory.samples
    assert marked(first) == ("<find>cat</find>", "1" * 16)
    assert bytes(second.prompt_token_ids or ()).decode() == (PROMPT + "<find>cat</find>[about")[-20:]
    assert marked(second) == ("<done>about</done>", "1" * 18) and trajectory.env_reward == 0.5


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (
            {"player": PLAYER.replace('return "?", False', 'raise KeyError("lost")')},
            "seeker/player.py:46: KeyError: 'lost'",
        ),
        (
            {"player": PLAYER.replace("return made", "return made.batch")},
            "returned a Tensors without prompts, responses",
        ),
        (
            {"main": MAIN.replace("return rewards", "return 1.0")},
            "main_ppo.py returned a float for one response, not [1, T]",
        ),
        ({"main": MAIN.replace("return rewards", "return rewards[0]")}, "returned rewards of shape (2,)"),
        (
            {"player": PLAYER.replace("import urllib.request", "import no_such_module as urllib")},
            "Player needs the package no_such_module",
        ),
        ({"trainer": TRAINER.replace("self.config.seeker.turns", "self.config.seeker.turn")}, "ray_trainer.py:"),
    ],
)
def test_errors_of_the_forks_code_are_named_with_their_line(
    played: Callable[..., Trajectory], files: dict[str, str], what: str
) -> None:
    trajectory = played(Says("hm$", "a", "a"), files, turns=0 if "main" in files else 2)
    assert trajectory.stop_reason is StopReason.FAILED and what in trajectory.failure


def test_a_server_that_does_not_answer_is_named_by_its_key(played: Callable[..., Trajectory]) -> None:
    trajectory = played(Says("<find>a</find>"), url="http://127.0.0.1:9/look")
    assert "no answer from seeker.url=http://127.0.0.1:9/look: start that server" in trajectory.failure
    assert "seeker/player.py:37" in trajectory.failure


class Pieces:
    """A tokenizer of some words and all characters."""

    words = ("</find>\n", "find", "</", "é")
    all_special_ids = (0,)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("" if token == 0 else self.words[token - 1] if token < 9 else chr(token) for token in tokens)

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        found = []
        while text:
            place = next((place for place, word in enumerate(self.words, 1) if text.startswith(word)), 0)
            found.append(place or ord(text[0]))
            text = text[len(self.words[place - 1]) if place else 1 :]
        return {"input_ids": found}

    def of(self, text: str) -> list[int]:
        return self("" + text)["input_ids"]


def test_a_token_that_the_class_cuts_in_two_is_written_again_outside_the_loss() -> None:
    """The response a</find>\\n is the tokens a, </find>\\n. Cut to a</find>, the loop reads </, find, > for it: the first token
    stays, and these three follow it with the observation."""
    pieces = Pieces()
    context = Context(pieces)
    context.answered(pieces.of("Q"), pieces.of("a</find>\n"))
    assert pieces.of("a</find>\n") == [ord("a"), 1]
    follows = context.follows([*pieces.of("Q"), *pieces.of("a</find>"), *pieces.of("[b]")])
    assert follows is not None and follows.keeps == 1
    assert follows.added == (3, 2, ord(">"), *map(ord, "[b]"))


def test_a_response_that_is_tokenised_otherwise_by_the_loop_stays_as_sampled() -> None:
    """The policy wrote f, i, n, d as four tokens, and the loop reads them as one."""
    pieces = Pieces()
    context = Context(pieces)
    context.answered([5000], [*map(ord, "find"), 0])
    follows = context.follows([5000, 2, *map(ord, "[b]")])
    assert follows is not None and (follows.keeps, follows.added) == (4, tuple(map(ord, "[b]")))


def test_what_does_not_continue_the_context_begins_another() -> None:
    pieces = Pieces()
    context = Context(pieces)
    context.answered([5000, 5001], pieces.of("ab"))
    assert context.follows([5001, *map(ord, "ab"), 5002]) is None
    assert context.follows([5000, 5001, *map(ord, "ab")]) is None  # nothing was added
    assert context.follows([5000, 5001, 5002]) is None  # nothing of the response stays


# The loop collects a hint for each row, with a method of the trainer, and passes a world of the program's and the step
COLLECTS = TRAINER.replace(
    "                output = player.play(rows, first)",
    """                if self.config.seeker.get("hints", True):
                    hints, kinds = self._hints(batch)
                else:
                    hints = []
                    for each in batch.non_tensor_batch["data_source"]:
                        hints.append(each)
                worlds = [self.world.copy() for _ in range(len(batch))]
                output = player.play(rows, first, hints, worlds, self.steps)""",
)
COLLECTS = COLLECTS.replace("        limits =", "        self.steps = 0\n        self.steps += 1\n        limits =")
COLLECTS = COLLECTS.replace("update_actor(batch)\n", "update_actor(batch)\n            self.steps += 1\n").replace(
    "    def fit(self):\n",
    """    def __init__(self, config, tokenizer, world=None, reward_fn=None):
        self.world = world

    def _hints(self, batch):
        seen, found = {}, []
        for name in batch.non_tensor_batch["index"]:
            seen[name] = seen.get(name, 0) + 1
            found.append(chr(ord("p") + seen[name]))
        return found, None

    def fit(self):
""",
)
TOLD = PLAYER.replace("rows, first):", "rows, first, hints, worlds, step):").replace(
    "        pad = self", '        self.said = "".join([*hints, *worlds[0], str(step), "."])\n        pad = self'
).replace('return "?", False', "return self.said, False")  # fmt: skip
WORLD = MAIN.replace("reward_fn=reward_fn)", "reward_fn=reward_fn, world=made)").replace(
    "    reward_fn = Scores", "    made = []\n    made.append(str(config.seeker.turns))\n    reward_fn = Scores"
)


@pytest.mark.parametrize(("hints", "said"), [(True, "qrs"), (False, "ttt")])
def test_arguments_that_the_loop_collects(played_group: Callable[..., Any], hints: bool, said: str) -> None:
    """Three responses to a prompt, of two turns each: the second context has what the class was told about its own response."""
    files = {"player": TOLD, "trainer": COLLECTS, "main": WORLD}
    group = played_group(files, hints=hints)
    told = [each.sampled_mask.index(False) for each in group]
    texts = [bytes(each.token_ids).decode()[place:] for each, place in zip(group, told, strict=True)]
    assert [text[:4] for text in texts] == [f"{letter}25." for letter in said]


def test_a_package_that_takes_its_names_from_the_class_file(played: Callable[..., Trajectory]) -> None:
    """The class imports a neighbour, for which Python runs the package, which imports the class again."""
    package = "from .player import Limits, Player\n"
    trajectory = played(Says("hm$", "<done>about</done>"), {"package": package})
    assert trajectory.failure == "" and marked(trajectory)[0] == "hm?<done>about</done>"


def test_a_class_that_samples_by_servers_on_request_samples_by_workers(played: Callable[..., Trajectory]) -> None:
    """Forks of verl 0.5 hand over the manager of its servers, where there are some; here verl's workers sample."""
    servers = 'self.async_rollout_manager if getattr(self, "async_rollout_mode", False) else None'
    files = {
        "trainer": TRAINER.replace("limits=limits)", f"limits=limits, servers={servers})"),
        "player": PLAYER.replace("quiet=True):", "quiet=True, servers=0):\n        assert servers is None"),
    }
    trajectory = played(Says("<done>about</done>"), files)
    assert trajectory.failure == "" and marked(trajectory)[0] == "<done>about</done>"
