#!/usr/bin/env bash
# GRPO on GSM8K with a tool, over several turns, as verl users type it: the model may have its answer checked before it gives one.
#
#   posttrain data gsm8k runs/data/gsm8k --train train.jsonl --test test.jsonl
#   bash examples/verl_gsm8k_tool.sh
#
# What is not verl's own: the sampler native. verl's file of the tool is read as it is, and its class need not be there.
# To see what it means before it runs: POSTTRAIN_COMMAND=plan bash examples/verl_gsm8k_tool.sh
set -euo pipefail

posttrain "${POSTTRAIN_COMMAND:-train}" --dialect verl \
    algorithm.adv_estimator=grpo \
    data.train_files=runs/data/gsm8k/train.parquet \
    data.val_files=runs/data/gsm8k/test.parquet \
    data.train_batch_size=8 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    data.return_raw_chat=True \
    +data.val_max_samples=100 \
    actor_rollout_ref.model.path="$HOME/models/Qwen3-0.6B" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="${TOOL_FILE:-examples/verl_tools/gsm8k_tool.yaml}" \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.logger='[console]' \
    trainer.project_name=gsm8k_tool \
    trainer.experiment_name=verl_gsm8k_tool \
    trainer.default_local_dir=runs/verl_gsm8k_tool \
    trainer.test_freq=20 \
    trainer.total_training_steps=100 \
    "$@"
