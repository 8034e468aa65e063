#!/usr/bin/env bash
# Counting shapes in pictures as verl users type it: GRPO on a vision-language model, the images in the column of data.image_key.
#
#   posttrain data shapes --train-rows 2048 --validation-rows 200 --seed 1 --max-shapes 4 --kinds 1 --size 24 \
#     --instruction "" runs/data/shapes
#   bash examples/verl_shapes.sh actor_rollout_ref.actor.optim.lr=1e-3
#
# The same run as examples/shape_counting.yaml, whose head says how the model folder named below is made. What is not verl's own:
# the sampler native, and the reward by its name here.
set -euo pipefail

posttrain "${POSTTRAIN_COMMAND:-train}" --dialect verl \
    algorithm.adv_estimator=grpo \
    data.train_files=runs/data/shapes/train.parquet \
    data.val_files=runs/data/shapes/validation.parquet \
    data.image_key=images \
    data.train_batch_size=32 \
    data.max_prompt_length=128 \
    data.max_response_length=1 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=runs/models/tiny_vision \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    +actor_rollout_ref.actor.freeze_vision_tower=False \
    actor_rollout_ref.actor.optim.lr=2e-3 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=20 \
    actor_rollout_ref.actor.optim.warmup_style=cosine \
    actor_rollout_ref.actor.optim.min_lr_ratio=0.05 \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0.15 \
    actor_rollout_ref.actor.clip_ratio_c=null \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    custom_reward_function.name=exact_match \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.logger='[console]' \
    trainer.project_name=shapes \
    trainer.experiment_name=verl_shapes \
    trainer.default_local_dir=runs/verl_shapes \
    trainer.save_freq=150 \
    trainer.test_freq=50 \
    trainer.max_actor_ckpt_to_keep=1 \
    trainer.total_training_steps=300 \
    +posttrain.model.compute_dtype=float32 \
    +posttrain.placement.device=cpu \
    +posttrain.placement.cpu_threads=1 \
    "$@"
