#!/usr/bin/env bash
# GRPO on chain_sum as SkyRL users type it: one override per line, no file. Runs on a CPU in a few minutes.
#
#   posttrain data reasoning-gym --task chain_sum --train-rows 120 --validation-rows 80 --seed 1 \
#     --option min_terms=2 --option max_terms=2 --option min_digits=1 --option max_digits=1 runs/data/chain_sum
#   bash examples/skyrl_grpo.sh trainer.policy.optimizer_config.lr=2e-5
#
# The same run as examples/grpo_chain_sum.yaml. What is not SkyRL's own: the sampler native, the reward by its name here, and
# the key below posttrain, for which SkyRL has none. `posttrain demo` writes the model folder named below. To see what it means
# before it runs: POSTTRAIN_COMMAND=plan bash examples/skyrl_grpo.sh
set -euo pipefail

posttrain "${POSTTRAIN_COMMAND:-train}" --dialect skyrl \
    data.train_data="['runs/data/chain_sum/train.parquet']" \
    data.val_data="['runs/data/chain_sum/validation.parquet']" \
    trainer.policy.model.path="$HOME/.cache/posttrain/SmolLM2-135M-Instruct" \
    trainer.placement.policy_num_gpus_per_node=1 \
    trainer.algorithm.advantage_estimator=grpo \
    trainer.algorithm.use_kl_loss=false \
    trainer.algorithm.loss_reduction=token_mean \
    trainer.max_training_steps=40 \
    trainer.train_batch_size=8 \
    trainer.policy_mini_batch_size=8 \
    trainer.micro_train_batch_size_per_gpu=16 \
    trainer.micro_forward_batch_size_per_gpu=32 \
    trainer.max_prompt_length=256 \
    trainer.gradient_checkpointing=false \
    trainer.policy.optimizer_config.lr=1.0e-5 \
    trainer.policy.optimizer_config.num_warmup_steps=2 \
    trainer.seed=1 \
    trainer.eval_interval=20 \
    trainer.ckpt_interval=20 \
    trainer.max_ckpts_to_keep=2 \
    trainer.ckpt_path=runs/skyrl_grpo/checkpoints \
    trainer.logger=console \
    trainer.project_name=chain_sum \
    trainer.run_name=skyrl_grpo \
    generator.backend=native \
    generator.n_samples_per_prompt=8 \
    generator.max_num_seqs=256 \
    generator.sampling_params.max_generate_length=24 \
    generator.sampling_params.temperature=0.7 \
    generator.eval_sampling_params.temperature=0.0 \
    environment.env_class=reasoning_gym \
    +environment.skyrl_gym.reasoning_gym.extract=last_number \
    +posttrain.validation.max_prompts=100 \
    "$@"
