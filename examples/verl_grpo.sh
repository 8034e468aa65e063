#!/usr/bin/env bash
# GRPO on chain_sum as verl users type it: one override per line, no file. Runs on a CPU in a few minutes.
#
#   posttrain data reasoning-gym --task chain_sum --train-rows 120 --validation-rows 80 --seed 1 \
#     --option min_terms=2 --option max_terms=2 --option min_digits=1 --option max_digits=1 runs/data/chain_sum
#   bash examples/verl_grpo.sh actor_rollout_ref.actor.optim.lr=2e-5
#
# The same run as examples/grpo_chain_sum.yaml. What is not verl's own: the sampler native, and the reward by its name here.
# `posttrain demo` writes the model folder named below. To see what it means before it runs:
# POSTTRAIN_COMMAND=plan bash examples/verl_grpo.sh
set -euo pipefail

posttrain "${POSTTRAIN_COMMAND:-train}" --dialect verl \
    algorithm.adv_estimator=grpo \
    data.train_files=runs/data/chain_sum/train.parquet \
    data.val_files=runs/data/chain_sum/validation.parquet \
    data.train_batch_size=8 \
    data.max_prompt_length=256 \
    data.max_response_length=24 \
    data.filter_overlong_prompts=True \
    +data.val_max_samples=100 \
    actor_rollout_ref.model.path="$HOME/.cache/posttrain/SmolLM2-135M-Instruct" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.clip_ratio_c=null \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.7 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    custom_reward_function.name=reasoning_gym \
    +custom_reward_function.reward_kwargs.extract=last_number \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.logger='[console]' \
    trainer.project_name=chain_sum \
    trainer.experiment_name=verl_grpo \
    trainer.default_local_dir=runs/verl_grpo \
    trainer.save_freq=20 \
    trainer.test_freq=20 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.total_training_steps=40 \
    "$@"
