"""The reward object of a fork's main program, as a batched term: made by the program's own statements, called as a manager.

    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0, cosine_cfg=cosine_cfg)
    trainer = RayPPOTrainer(..., reward_fn=reward_fn)

Of the program and of the files that it imports only what these statements need is run; ``config`` is the term's options.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.config.reward import RewardTerm
from posttrain.errors import ConfigError, Problem, RequestError
from posttrain.interfaces.reward import BatchedRewardFn
from posttrain.rewards.manager import Managed, TokenizerOf
from posttrain.user_files import loading_problem, source_file
from posttrain.verl_episodes import EpisodeReward, find_reward
from posttrain.verl_scoring import root_of


def check_program(term: RewardTerm) -> None:
    """Check, without running it, that the program passes an object of the class to its trainer. Raises: ConfigError."""
    _found(term)


def load_program(term: RewardTerm, tokenizer: TokenizerOf | None) -> BatchedRewardFn:
    """Make the object. Raises: ConfigError, with the fork's own file and line."""
    root, found = _found(term)
    if tokenizer is None:
        raise ConfigError(Problem("a fork's reward object needs a run's tokenizer, and this command loads none"))
    from omegaconf import OmegaConf

    from posttrain.libraries.verl.parts import Checkout, Values

    given = {"config": OmegaConf.create(dict(term.options)), "tokenizer": tokenizer()}
    try:
        made = Values(Checkout(root), found.site, given).evaluated(found.value)
    except RequestError:
        raise
    except (Exception, SystemExit) as error:  # the fork's own code
        raise ConfigError(loading_problem(error, root, found.name)) from error
    return Managed(made, found.file)


def _found(term: RewardTerm) -> tuple[Path, EpisodeReward]:
    assert term.path is not None
    program = source_file(term.path, holds="the program that makes the reward object")
    root = root_of(program)
    found = find_reward(program, [root])
    if found is None or found.name != term.name:
        what = f"{term.path} passes no object of a class {term.name} of its own to a trainer as reward_fn"
        raise ConfigError(Problem(what, fix=f"name {found.name}" if found is not None else ""))
    return root, found
