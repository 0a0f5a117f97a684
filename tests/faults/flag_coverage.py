"""Which test fails when a flag is ignored. A declared flag that is in none of these tables fails test_flag_coverage.py.

TWINS are two small runs that differ in that flag alone and must differ in what is looked at. ELSEWHERE names the test
of a flag that has its own. RESOLVED_ONLY are flags of which only the resolved configuration or the DeepSpeed JSON is
compared: no CPU run shows their effect.
"""

from typing import Any, Literal, NamedTuple

Look = Literal["weights", "metrics", "files", "dtype", "printed"]


class Twin(NamedTuple):
    """The flag's other value, what must differ, the stage, and what both runs set besides."""

    value: Any
    look: Look = "weights"
    stage: str = "sft"
    both: dict[str, Any] = {}


# Tokens that some of the rows have more of.
SHORT, SHORT_PROMPT = 25, 18
LORA = {"lora_dim": 2, "learning_rate": 1e-2, "max_steps": 3}
WARM = {"max_steps": 3, "lr_scheduler_type": "linear"}
EMA = {"enable_ema": "true"}
ADAPTIVE = {"kl_target": 0.01, "max_steps": 2}
TEXT = {"unsupervised_data_path": "@text.jsonl"}

TWINS: dict[str, Twin] = {
    "adam_beta1": Twin(0.5),
    "adam_beta2": Twin(0.5),
    "adam_eps": Twin(1e-2),
    "column_map": Twin("prompt=chosen"),
    "data_path": Twin("@more.jsonl"),
    "data_seed": Twin(7, both={"data_split": "2,4,4"}),
    "data_split": Twin("4,3,3"),
    "dtype": Twin("bf16"),
    "enable_csv": Twin("true", "files"),
    "enable_tensorboard": Twin("false", "files"),
    "eval_data_path": Twin("@more.jsonl", "metrics"),
    "eval_interval": Twin(1, "metrics"),
    "eval_iters": Twin(1, "metrics", both={"per_device_eval_batch_size": 1}),
    "gradient_accumulation_steps": Twin(2),
    "learning_rate": Twin(1e-2),
    "lora_alpha": Twin(64, both=LORA),
    "lora_dim": Twin(2, "files"),
    "lora_dropout": Twin(0.5, both=LORA),
    "lora_learning_rate": Twin(1e-1, both=LORA),
    "lora_module_name": Twin("q_proj", both=LORA),
    "lr_scheduler_type": Twin("constant"),
    "max_grad_norm": Twin(1e-4, both={"adam_eps": 1e-2}),
    "max_seq_len": Twin(SHORT),
    "max_steps": Twin(3),
    "min_learning_rate_ratio": Twin(0.9, both=WARM),
    "model_name_or_path": Twin("@other"),
    "num_train_epochs": Twin(2, "metrics", both={"max_steps": 0}),
    "num_warmup_steps": Twin(2, both=WARM),
    "only_optimize_lora": Twin("false", both=LORA),
    "overwrite": Twin("true", "printed", both={"twice": True}),
    "packing": Twin("true", both={"data_path": "@train.jsonl"}),
    "per_device_train_batch_size": Twin(2),
    "run_dir": Twin("@elsewhere", "files"),
    "save_adapter_only": Twin("true", "files", both=LORA),
    "save_dtype": Twin("bf16", "dtype"),
    "save_steps": Twin(1, "files"),
    "keep_checkpoints": Twin(1, "files", both={"save_steps": 1, "max_steps": 3}),
    "seed": Twin(99),
    "sft_only_data_path": Twin("@more.jsonl"),
    "template": Twin("human_assistant", both={"model_name_or_path": "@templated"}),
    "train_on_prompt": Twin("true"),
    "train_turns": Twin("last", both={"data_path": "@turns.jsonl", "eval_data_path": "@test.jsonl"}),
    "weight_decay": Twin(0.9, both={"learning_rate": 1e-2}),
    "centering_coef": Twin(0.5, stage="reward"),
    "reward_loss": Twin("per_token", stage="reward"),
    "long_pairs": Twin("truncate_left", stage="reward", both={"max_seq_len": 40}),
    "approx_kl_stop": Twin(1e-12, stage="ppo", both={"ppo_epochs": 3, "max_steps": 3}),
    "critic_warmup_steps": Twin(1, stage="ppo"),
    "ema_decay": Twin(0.1, stage="ppo", both=EMA),
    "enable_ema": Twin("true", "files", stage="ppo"),
    "gae_lambda": Twin(0.1, stage="ppo"),
    "gamma": Twin(0.5, stage="ppo"),
    "generation_batches": Twin(2, "metrics", stage="ppo"),
    "kl_coef": Twin(5.0, stage="ppo", both={"ppo_epochs": 1, "max_steps": 3}),
    "kl_estimator": Twin("k3", "metrics", stage="ppo", both={"max_steps": 3, "kl_coef": 5.0}),
    "kl_in_loss": Twin("true", "metrics", stage="ppo", both={"kl_estimator": "k2", "max_steps": 3, "kl_coef": 5.0}),
    "kl_target": Twin(0.01, "metrics", stage="ppo", both={"max_steps": 3}),
    "kl_horizon": Twin(10, "metrics", stage="ppo", both=ADAPTIVE),
    "long_prompts": Twin("truncate_left", "metrics", stage="ppo", both={"max_prompt_seq_len": SHORT_PROMPT}),
    "max_answer_seq_len": Twin(3, "metrics", stage="ppo"),
    "max_prompt_seq_len": Twin(SHORT_PROMPT, "metrics", stage="ppo", both={"long_prompts": "truncate_left"}),
    "missing_eos_penalty": Twin(4.0, stage="ppo"),
    "normalise_scores": Twin("false", stage="ppo"),
    "num_samples_per_prompt": Twin(2, "metrics", stage="ppo"),
    "old_log_probs": Twin("sampler", "metrics", stage="ppo"),
    "per_device_generation_batch_size": Twin(8, "metrics", stage="ppo"),
    "policy_clip": Twin(1e-6, stage="ppo", both={"ppo_epochs": 3, "max_steps": 3}),
    "ppo_epochs": Twin(2, stage="ppo", both={"max_steps": 2}),
    "reward_clip": Twin(0.01, stage="ppo"),
    "temperature": Twin(0.3, "metrics", stage="ppo"),
    "top_k": Twin(1, "metrics", stage="ppo"),
    "top_p": Twin(0.1, "metrics", stage="ppo"),
    "unsup_coef": Twin(0.1, stage="ppo", both=TEXT),
    "unsupervised_data_path": Twin("@text.jsonl", stage="ppo"),
    "value_clip": Twin(1e-6, stage="ppo", both={"ppo_epochs": 3, "max_steps": 3, "learning_rate": 1e-2}),
    "whiten_advantages": Twin("false", stage="ppo"),
    "reward_model_name_or_path": Twin("@other-scorer", stage="ppo"),
}  # fmt: skip

ELSEWHERE: dict[str, str] = {
    "actor_model": "launching/test_train.py::test_config_file_replaces_chained_folders_and_keeps_origins",
    "actor_zero_stage": "launching/test_train.py::test_flags_reach_their_step",
    "attn_implementation": "models/test_causal_lm.py::test_packing_is_refused_where_attention_takes_no_mask",
    "batch_size": "rlhf/test_compare.py::test_greedy_is_the_default_and_ignores_the_seed",
    "debug": "faults/test_flag_coverage.py::test_debug_shows_the_traceback",
    "deepspeed_config": "configuration/test_ds_json.py::test_the_json_is_a_layer_above_the_defaults",
    "deployment_type": "launching/test_train.py::test_every_preset_on_every_deployment",
    "dry_run": "launching/test_train.py::test_flags_reach_their_step",
    "enable_wandb": "training/test_metrics.py::test_a_sink_that_cannot_be_made_is_left_out",
    "eval_fraction": "data/test_cache.py::test_columns_are_as_documented",
    "exclude": "launching/test_train.py::test_flags_reach_their_step",
    "force_resume": "faults/test_resume_changed.py::test_changed_data_is_refused_unless_forced",
    "generation_engine": "generation/test_generation_runs.py::test_a_run_with_another_backend_has_the_same_numbers",
    "hostfile": "launching/test_launch.py::test_multi_node",
    "include": "launching/test_launch.py::test_include_replaces_the_count",
    "inference_tp_size": "multi/test_ranks_decode.py::test_inference_tp_size_changes_no_rollout_of_step_3",
    "json_output": "step2_reward/test_step2_eval.py::test_the_command_reports_on_held_out_pairs",
    "keep_best": "faults/test_resume_changed.py::test_a_best_model_that_is_gone_is_not_taken_for_saved",
    "language": "inference/test_comparison.py::test_bundled_prompts_are_eight_different_questions",
    "master_addr": "launching/test_launch.py::test_words_survive_pdsh",
    "master_port": "launching/test_launch.py::test_single_gpu",
    "max_bad_steps": "faults/test_bad_numbers.py::test_for_good_ends_with_4",
    "max_new_tokens": "rlhf/test_chat.py::test_a_models_own_generation_config_changes_nothing",
    "max_restarts": "launching/test_launcher.py::test_no_restart_without_the_flag_or_after_success",
    "merge_lora_for_generation": "generation/test_generation_runs.py::test_what_cannot_be_had_is_refused",
    "model_name_or_path_baseline": "rlhf/test_compare.py::test_models_of_other_vocabularies_and_architectures",
    "model_name_or_path_finetune": "rlhf/test_compare.py::test_models_of_other_vocabularies_and_architectures",
    "num_beams": "rlhf/test_compare.py::test_several_answers_to_a_prompt",
    "num_gpus": "launching/test_launch.py::test_single_gpu",
    "num_return_sequences": "rlhf/test_compare.py::test_several_answers_to_a_prompt",
    "offload": "configuration/test_ds_config.py::test_stage_3_with_everything_offloaded",
    "offload_optimizer_during_rollout": "engine/test_engine_memory.py::test_a_run_goes_the_same_way_with_and_without",
    "zero3_gather": "engine/test_zero3_gather.py::test_layer_by_layer_remembers_no_values",
    "offload_parameters": "configuration/test_ds_config.py::test_stage_3_with_everything_offloaded",
    "output": "rlhf/test_compare.py::test_a_model_against_itself_ties_everywhere",
    "output_dir": "faults/test_security_names.py::test_a_strange_name_is_used_as_it_is",
    "model": "faults/test_input_models.py::test_a_broken_model_folder",
    "dropout": "launching/test_dschat.py::test_dropout_other_than_0_is_refused",
    "prompt": "faults/test_security_secrets.py::test_what_a_person_says_to_a_model_is_no_setting",
    "prompts": "faults/test_input_corpus.py::test_a_malformed_file",
    "rank_timeout_s": "faults/test_ranks_ending.py::test_a_rank_that_hangs",
    "release_inference_cache": "generation/test_generation_runs.py::test_the_inference_cache_is_released",
    "repetition_penalty": "rlhf/test_chat.py::test_a_models_own_generation_config_changes_nothing",
    "resume": "faults/test_resume_changed.py::test_an_older_step_is_resumed_by_name",
    "reward_model": "rlhf/test_compare.py::test_a_model_against_itself_ties_everywhere",
    "reward_zero_stage": "launching/test_train.py::test_flags_reach_their_step",
    "rollout_weights": "multi/test_ranks_streaming.py::test_rollout_weights_changes_no_rollout_of_step_3",
    "save_in_background": "faults/test_saving_interrupted.py::test_training_goes_on_while_a_checkpoint_is_written",
    "step": "launching/test_train.py::test_flags_reach_their_step",
    "system": "rlhf/test_chat.py::test_commands_act_on_the_conversation",
    "data_output_path": "faults/test_flag_coverage.py::test_rows_are_kept_where_the_flag_says",
    "print_steps": "faults/test_flag_coverage.py::test_progress_lines_are_as_far_apart_as_the_flag_says",
    "zero_stage": "configuration/test_ds_config.py::test_stage_2",
}

IN_JSON = (
    "the DeepSpeed JSON that is built (test_ds_config.py, test_ds_json.py); its effect needs a GPU or several ranks"
)
RESOLVED_ONLY: dict[str, str] = {
    "allgather_bucket_size": IN_JSON, "communication_data_type": IN_JSON, "deepspeed_monitor": IN_JSON,
    "hysteresis": IN_JSON, "initial_scale_power": IN_JSON, "loss_scale": IN_JSON, "loss_scale_window": IN_JSON,
    "min_loss_scale": IN_JSON, "overlap_comm": IN_JSON, "reduce_bucket_size": IN_JSON,
    "stage3_param_persistence_threshold": IN_JSON, "wall_clock_breakdown": IN_JSON,
    "offload_reference_model": IN_JSON, "offload_reward_model": IN_JSON,
    "gradient_checkpointing": "changes memory only; tests/multi compares the numbers",
    "per_device_eval_batch_size": "changes memory only",
    "deterministic": "GPU kernels only",
    "local_rank": "set by launchers; the environment wins",
    "deepspeed": "accepted for the launcher's sake, without effect",
    "process_group_timeout_s": "handed to torch.distributed",
}  # fmt: skip
