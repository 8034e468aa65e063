"""verl's recipes: programs that start from a file of their own, beside them; some have an algorithm that is not here.

Source: https://github.com/verl-project/verl-recipe and verl's folder recipe/, 0.3 to 0.7.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """A program of a recipe."""

    file: str = "ppo_trainer"  # the file that it starts from, without .yaml
    # Differences of that file from ppo_trainer that change a run, for where the file itself is not on this disk.
    holds: tuple[str, ...] = ()
    refused: str = ""  # why nothing of it runs here
    asks: str = ""  # what its algorithm does beyond verl's PPO, which a run leaves out if that is confirmed by name


_DAPO = ("reward_model.reward_manager=dapo",)
_OWN_DEVICES = ("+rollout.nnodes=1", "+rollout.n_gpus_per_node=8", "actor_rollout_ref.hybrid_engine=False")
_FULLY_ASYNC = Recipe(
    "fully_async_ppo_trainer", (*_OWN_DEVICES, "data.train_batch_size=0", "+async_training.staleness_threshold=0.1")
)
_ONE_STEP_OFF = Recipe("one_step_off_ppo_trainer", _OWN_DEVICES)
_SPPO = (
    "algorithm.adv_estimator=null",
    "algorithm.sppo_eta=1.0",
    "actor_rollout_ref.actor.sppo_eta=1.0",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=15",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "trainer.log_val_generations=0",
)
_SPIN = (
    "algorithm.adv_estimator=null",
    "actor_rollout_ref.actor.dpo_beta=0.1",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=15",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "trainer.log_val_generations=0",
    "trainer.ref_update_freq=1",
)
_PRIME = (
    "algorithm.adv_estimator=rloo",
    "algorithm.reward_gt_coef=5",
    "algorithm.reward_dpo_coef=5",
    "algorithm.kl_ctrl.kl_coef=0.0",
    "data.filter_accuracy=True",
    "data.accuracy_lower_bound=0.2",
    "data.accuracy_upper_bound=0.8",
    "data.oversample_factor=4.0",
    "data.filter_truncate=True",
    "data.truncation=right",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.entropy_coeff=0.001",
    "reward_model.enable=True",
    "reward_model.prime_granularity=token",
    "reward_model.prime_norm=batch_norm",
    "reward_model.mini_batch_size=${actor_rollout_ref.actor.ppo_mini_batch_size}",
    "reward_model.reward_manager=prime",
    "reward_model.model.update=before",
    "reward_model.model.beta_train=0.05",
    "reward_model.model.optim.lr=1e-6",
    "trainer.val_before_train=False",
    "trainer.balance_batch=False",
)
_GKD = (
    *_OWN_DEVICES,
    "rollout.n_gpus_per_node=4",
    "trainer.n_gpus_per_node=4",
    "+actor_rollout_ref.teacher.server_ip=localhost",
    "+actor_rollout_ref.teacher.server_port=15555",
    "+trainer.scheduler=one_step_off",
    "actor_rollout_ref.actor.strategy=megatron",
    "+actor_rollout_ref.actor.micro_batch_size=2",
    "+actor_rollout_ref.actor.max_token_len=1024",
    "data.prompt_key=question",
    "data.filter_overlong_prompts=False",
    "actor_rollout_ref.rollout.load_format=dummy_megatron",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enable_chunked_prefill=False",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "trainer.test_freq=-1",
)
_IN_A_QUEUE = Recipe()

# By the end of the module's dotted name.
RECIPES: dict[str, Recipe] = {
    "dapo.main_dapo": Recipe("dapo_trainer", _DAPO),
    "entropy.main_entropy": Recipe("entropy_trainer", _DAPO),
    "fully_async_policy.fully_async_main": _FULLY_ASYNC,
    "one_step_off_policy.main_ppo": _ONE_STEP_OFF,
    "transfer_queue.main_ppo": _IN_A_QUEUE,
    "partial_rollout.main_ppo": _IN_A_QUEUE,
    "specRL.main_ppo": Recipe("specRL_trainer"),
    "histoSpec.main_ppo": Recipe("specRL_trainer"),
    "prime.main_prime": Recipe("prime_trainer", _PRIME),
    "spin.main_spin": Recipe("spin_trainer", _SPIN),
    "sppo.main_sppo": Recipe("sppo_trainer", _SPPO),
    "flowrl.main_flowrl": Recipe("flowrl_trainer", asks="its loss is a flow balance with a learned partition function"),
    "gvpo.gvpo_main_ppo": Recipe("gvpo_trainer", asks="its loss is GVPO's regression on centred rewards"),
    "spo.spo_main_ppo": Recipe("spo_trainer", asks="it keeps a running value for every prompt in place of a group"),
    "rep_exp.main_rep_exp": Recipe(
        "rep_exp_trainer", asks="it rewards elliptical bonuses over the policy's hidden states"
    ),
    "main_gkd": Recipe("on_policy_distill_trainer", _GKD),
    "vla.main_ppo": Recipe("rob_ppo_trainer", refused="it trains models that act in simulated robots, not on text"),
    "vla.main_sac": Recipe("rob_sac_trainer", refused="it trains models that act in simulated robots, not on text"),
    "main_dance": Recipe("dance_ppo_trainer", refused="it trains models that make images, not text"),
    "atropos.main_atropos": Recipe(
        "atropos_trainer", refused="its samples come from Atropos' own server; an environment of your own plays here"
    ),
}  # fmt: skip


def recipe_of(module: str) -> Recipe | None:
    """The recipe of a program, by its dotted name as the script writes it."""
    return next((recipe for name, recipe in RECIPES.items() if f".{module}".endswith(f".{name}")), None)
