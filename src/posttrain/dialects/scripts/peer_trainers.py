"""Facts about the peers' trainer classes: where they are imported from, their methods, and what verl's own loop calls.

Source: verl/trainer/ppo/ray_trainer.py of every release of verl from 0.1 to 0.9, and SkyRL's entrypoints/main_base.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A trainer of a peer that programs of third parties build."""

    name: str
    module: str  # the peer's own entry point
    dialect: str
    modules: str  # a pattern of the modules that its class is imported from
    methods: frozenset[str] = frozenset()  # those of its class


_RAY_METHODS = frozenset(
    """fit _validate _validate_config _create_dataloader init_workers _save_checkpoint _load_checkpoint _balance_batch
    _get_gen_batch _compute_values _compute_ref_log_prob _compute_old_log_prob _compute_or_extract_reward
    _compute_reward_colocate _update_actor _update_critic compute_rollout_importance_weights_and_add_to_batch
    _dump_generations _log_rollout_data _maybe_log_val_generations _maybe_log_val_generations_to_wandb
    _merge_validation_results _val_metrics_update _write_generations _start_profiling _stop_profiling""".split()  # noqa: SIM905
)
# Methods whose replacement leaves a step's numbers as they are: they check, report, save, place workers or read rows
OUTSIDE_THE_LOOP = _RAY_METHODS - frozenset(
    """fit _get_gen_batch _compute_values _compute_ref_log_prob _compute_old_log_prob _compute_or_extract_reward
    _compute_reward_colocate _update_actor _update_critic compute_rollout_importance_weights_and_add_to_batch""".split()  # noqa: SIM905
) | {"get_tracker", "get_cfg_as_str", "get_train_dataset", "get_eval_dataset", "get_colocate_pg"}
_RAY = Peer(
    "verl's PPO trainer", "verl.trainer.main_ppo", "verl", r"^verl\.(\w+\.)*ray_trainer$|^\.*ray_trainer$", _RAY_METHODS
)
_MAIN = Peer("verl's PPO trainer", "verl.trainer.main_ppo", "verl", r"^verl\.(\w+\.)*main_ppo$")
_SFT = Peer("verl's SFT trainer", "verl.trainer.fsdp_sft_trainer", "verl", r"^verl\.trainer\.fsdp_sft_trainer$")
_EXP = Peer(
    "SkyRL's trainer",
    "skyrl_train.entrypoints.main_base",
    "skyrl",
    r"^skyrl(_train|\.train)\.entrypoints\.main_base$",
    frozenset(
        """get_cfg_as_str get_train_dataset get_eval_dataset get_colocate_pg get_generator get_trainer get_tracker
        get_inference_client _setup_trainer""".split()  # noqa: SIM905
    ),
)
# Calls of the run method of SkyRL's experiments, by the last name: asyncio.run(trainer.train())
RUN_CALLS = frozenset({"_setup_trainer", "train", "run", "info", "print"})
# Names that a program imports -> the trainer that it builds
BASES = {
    "RayPPOTrainer": _RAY,
    "run_ppo": _MAIN,
    "main_task": _MAIN,
    "TaskRunner": _MAIN,
    "FSDPSFTTrainer": _SFT,
    "BasePPOExp": _EXP,
}
# Generators and trainers of SkyRL's that a program puts into its experiment -> overrides that ask for the same here
SKYRL_PARTS: dict[str, tuple[str, ...]] = {
    "SkyRLGymGenerator": (),
    # Asks the run's own sampler, over HTTP
    "SkyRLGymHTTPGenerator": ("++generator.enable_http_endpoint=false",),
    "StepWiseGenerator": ("++trainer.step_wise_training=true",),
    "VerifiersGenerator": ("+posttrain.environment.name=verifiers",),
    "RayPPOTrainer": (),
    "StepWiseTrainer": (),
    "DAPOTrainer": (),
    "OnPolicyDistillationTrainer": (),
    "AsyncRayPPOTrainer": ("+posttrain.asynchronous.mode=one_step",),
    "FullyAsyncRayPPOTrainer": ("++trainer.fully_async.enabled=true",),
    "FullyAsyncDAPOTrainer": ("++trainer.fully_async.enabled=true",),
    # A few steps on rows of full length
    "FullCtxTrainer": (
        "+posttrain.data.dataset_class_file='pkg://posttrain.data.full_length'",
        "+posttrain.data.dataset_class_name=FullLengthPrompts",
    ),
}
# Calls of verl's own RayPPOTrainer, by the last name. A loop that calls others computes something that verl's does not.
LOOP_CALLS = frozenset(
    """
    _compute_reward_legacy _compute_teacher_colocate _should_compute_teacher_colocate wake_up_replicas
    AdaptiveKLController AgentLoopManager AsyncLLMServerManager CheckpointEngineManager DataLoader FixedKLController
    Generator MultiTeacherModelManager RLHFDataset RandomSampler RandomState RayClassWithInitArgs RewardLoopManager
    RolloutSkip SequentialSampler StatefulDataLoader Table ThreadPoolExecutor Timer Tracking TrainingWorkerConfig
    ValidationGenerationsLogger _balance_batch _compute_old_log_prob _compute_or_extract_reward _compute_ref_log_prob
    _compute_reward_colocate _compute_values _create_dataloader _dump_generations _get_dp_size _get_gen_batch
    _init_dump_executor _load_checkpoint _log_rollout_data _maybe_log_val_generations _maybe_log_val_generations_to_wandb
    _query_dispatch_info _save_checkpoint _shutdown_dump_executor _start_profiling _stop_profiling _timer _update_actor
    _update_critic _val_metrics_update _validate _validate_config add_data agg_loss apply_bypass_mode apply_kl_penalty
    apply_rollout_correction array asarray assign_non_tensor async_calls_finalize_fn_exec batch_decode
    calculate_debug_metrics calculate_workload cat check_mutually_exclusive close compute_advantage compute_data_metrics
    compute_log_prob compute_ref_log_prob compute_response_mask compute_reward compute_rm_score
    compute_rollout_correction_and_add_to_batch compute_rollout_importance_weights
    compute_rollout_importance_weights_and_add_to_batch compute_spec_decode_metrics compute_throughout_metrics
    compute_timing_metrics compute_values compute_variance_proxy_metrics concat concatenate cpu create
    create_colocated_worker_cls create_resource_pool create_rl_dataset create_rl_sampler debug decode deepcopy defaultdict
    deprecated detach done dump_memory_snapshot dumps error exists exp extract_reward find_latest_ckpt_path
    from_single_dict from_tensordict generate_sequences get_client get_group_balanced_partitions get_kl_controller
    get_n_gpus get_replicas get_resource_pool get_seqlen_balanced_partitions get_tensordict getcwd infer_batch info init
    init_model is_distillation_enabled isabs item left_right_2_no_padding load load_checkpoint load_class_from_fqn
    load_state_dict local_mkdir local_mkdir_safe log log_dict log_seqlen_unbalance makedirs manual_seed marked_timer
    masked_select mean need_critic need_reference_policy need_reward_model need_teacher_policy no_padding_2_padding numpy
    omega_conf_to_dataclass on_batch_end ones open_dict pad_dataproto_to_divisor partial perf_counter pprint
    process_validation_metrics ray_worker_group_cls reduce_metrics remote rename_dict reorder repeat reset result
    resume_dataset_state reward_fn save save_checkpoint select set_loss_fn set_step set_struct should_save_ckpt_esi
    shuffle shutdown size sleep sleep_replicas spawn start_profile state_dict std stop_profile submit tensor tensor_split
    time to to_container to_tensordict tolist tqdm train_mini_batch unpad_dataproto update_actor update_critic
    update_weights uuid4 val_reward_fn view wake_up warning wrap_generate_sequences write zeros
""".split()  # noqa: SIM905
)
# The same of SkyRL's own RayPPOTrainer, of every state from June 2025 to August 2026
SKYRL_LOOP_CALLS = frozenset(
    """
    CallbackHandler CallbackInput ConditionalWeightsManager Generator InferenceWeightsManager PPORayActorGroup Path
    RayGpuMonitor ResolvedPlacementGroup ResumeMode StatefulDataLoader TensorList Timer TrainingControl
    TrainingInputBatch VLLMMetricsScraper WorkerDispatch _build_callback_input
    _build_train_dataloader_and_compute_training_steps _cleanup_old_checkpoints _execute_forward_pass
    _execute_training_step _fire _normalize_advantages _prepare_generator_input _remove_tail_data _skip_policy_forward
    aclose apply_loss_reduction_to_advantages_minibatch apply_reward_kl_penalty array asdict async_init_model
    async_run_ray_method backload_to_gpu build_dataloader cat ceil clamp cleanup_old_checkpoints clone close
    collect_results compute_advantages_and_returns compute_approx_kl compute_prompt_boundaries
    compute_prompt_mini_batch_boundaries concatenate_generator_outputs concatenate_outputs_after_mesh_dispatch
    configure_ray_worker_logging convert_prompts_responses_to_batch_tensors convert_to_training_input cpu cumsum
    decode deepcopy defaultdict empty_cache evaluate evaluate_step_wise exists exp extract_step_from_path
    finalize_minibatch_rollout_logprob_diff_std finalize_pending_saves finish flush forward
    forward_backward_from_staged forward_from_staged fwd_logprobs_values_reward gcd generate get_kl_controller
    get_lcm_dp_size get_node_ids get_ray_pg_ready_with_timeout get_sampling_params_for_backend handle_dynamic_sampling
    info init_model init_weight_sync_state item lcm load load_checkpoint load_checkpoints load_state_dict
    loss_fn_outputs_to_tensor make_router_padding_mask makedirs manual_seed mark_all_offloaded masked_mean
    masked_select mean merge_stepwise_output mkdir no_grad normalize_advantages_dict numel numpy
    off_policy_correction_enabled offload_to_cpu ones ones_like open_file optim_step pad_batch
    pad_training_input_batch pause placement_group postprocess_generator_output prepare_generator_input read reset
    resolve resume rmtree rsqrt run run_on_each_node sample select setup_policy_and_generator sleep stage_data start
    state_dict std stop sync_policy_weights_to_inference_engines tensor to to_string tqdm train_critic_and_policy
    update_condition update_ref_with_policy uuid4 validate_consistency_for_latest_checkpoint validate_generator_output
    wake_up warning zero_variance_filter zeros zeros_like
""".split()  # noqa: SIM905
)
# A loop of SkyRL's makes these
SKYRL_STEP = (
    "generate",
    "convert_to_training_input",
    "fwd_logprobs_values_reward",
    "compute_advantages_and_returns",
    "train_critic_and_policy",
)
# Methods of its trainer whose replacement is such a loop, or beside it
SKYRL_REPLACED = frozenset({"__init__", "train", "generate", "eval", "_prepare_generator_input"})
