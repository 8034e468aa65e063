#!/usr/bin/env bash
# GRPO over several turns as SkyRL users type it: the environment gsm8k_multi_turn of the package skyrl-gym asks again until the
# answer is right or the turns are over, and every turn has a reward.
#
#   pip install 'posttrain[skyrl-gym]'
#   bash examples/skyrl_multi_turn.sh data.train_data="['train.parquet']" data.val_data="['validation.parquet']"
#
# Rows are SkyRL's: prompt (a list of messages) and reward_spec.ground_truth (the number as text). What is not SkyRL's own is
# the sampler native. `posttrain demo` writes the model folder named below. To see what it means before it runs:
# POSTTRAIN_COMMAND=plan bash examples/skyrl_multi_turn.sh ...
set -euo pipefail

posttrain "${POSTTRAIN_COMMAND:-train}" --dialect skyrl \
    trainer.policy.model.path="$HOME/.cache/posttrain/SmolLM2-135M-Instruct" \
    trainer.placement.policy_num_gpus_per_node=1 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.algorithm.use_kl_loss=false \
    trainer.algorithm.loss_reduction=token_mean \
    trainer.max_training_steps=40 \
    trainer.train_batch_size=4 \
    trainer.policy_mini_batch_size=4 \
    trainer.micro_train_batch_size_per_gpu=8 \
    trainer.micro_forward_batch_size_per_gpu=16 \
    trainer.max_prompt_length=256 \
    trainer.gradient_checkpointing=false \
    trainer.policy.optimizer_config.lr=1.0e-5 \
    trainer.seed=1 \
    trainer.eval_interval=20 \
    trainer.ckpt_interval=20 \
    trainer.ckpt_path=runs/skyrl_multi_turn/checkpoints \
    trainer.logger=console \
    trainer.run_name=skyrl_multi_turn \
    generator.backend=native \
    generator.batched=false \
    generator.async_engine=true \
    generator.n_samples_per_prompt=4 \
    generator.max_turns=3 \
    generator.max_input_length=768 \
    generator.use_conversation_multi_turn=true \
    generator.append_eos_token_after_stop_str_in_multi_turn=true \
    generator.zero_reward_on_non_stop=false \
    generator.apply_overlong_filtering=false \
    generator.sampling_params.max_generate_length=64 \
    generator.eval_sampling_params.temperature=0.0 \
    environment.env_class=gsm8k_multi_turn \
    environment.skyrl_gym.max_env_workers=16 \
    "$@"
