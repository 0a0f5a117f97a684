"""The test of every flag that fails when the flag is ignored; test_flag_coverage.py ignores each and sees it fail.

Keys are `<command>.<flag>`: each command has its own, also for a flag that it shares with others (shared_flags.py).
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from shared_flags import ONE_PLACE as ONE_PLACE
from shared_flags import REFUSED, STAGES, shared_tests, tests_of_other_stages

Look = Literal["weights", "metrics", "files", "dtype", "printed", "answer", "calls"]


class FlagTest(NamedTuple):
    """Two small runs that differ in one flag alone: its other value, what must differ, and what both set besides."""

    value: Any
    look: Look = "weights"
    both: dict[str, Any] = {}
    spy: str = ""  # for the look "calls": the method whose calls are counted


# Tokens that some of the rows have more of.
SHORT, SHORT_PROMPT = 25, 18
CUT = {"long_prompts": "truncate_left", "max_prompt_seq_len": 64}
LORA = {"lora_dim": 2, "learning_rate": 1e-2, "max_steps": 3}
# A run of ZeRO stage 3 whose buckets leave memory to the runs after it.
SMALL_BUCKETS = {
    "zero_stage": 3, "deepspeed_config": str(Path(__file__).parent.parent / "support" / "small_buckets.json")
}  # fmt: skip
WARM = {"max_steps": 3, "lr_scheduler_type": "linear"}
EMA = {"enable_ema": "true"}
ADAPTIVE = {"kl_target": 0.01, "max_steps": 2}
TEXT = {"unsupervised_data_path": "@text.jsonl"}
KTO = {"method": "kto"}
CLIPPED = {"ppo_epochs": 3, "max_steps": 3}
# A run without a critic that compares the responses to a prompt.
GROUPS = {
    "method": "grpo", "num_samples_per_prompt": 4, "critic_model_name_or_path": None,
    "reward_model_name_or_path": "@other-scorer",
}  # fmt: skip
# Some prompts have answers that all get 1, and not all prompts have.
SHORT_ANSWERS = '{"name": "length", "args": {"high": 10, "margin": 1}}'
RIGHT = {"reward_function": SHORT_ANSWERS}
OPT = "transformers.models.opt.modeling_opt"
FORWARD = f"{OPT}:OPTDecoder.forward"
FETCH = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator.fetch_sub_module"
PAIR = {"model": None, "model_name_or_path_baseline": "@base", "model_name_or_path_finetune": "@base"}
HOT = {"temperature": 2.0, "seed": 1}

# An @ in front of a value: a file or folder of the inputs.
# Flags of both commands that evaluate models on rows.
ON_ROWS = {
    "eval_split": FlagTest("all", "answer"),
    "eval_fraction": FlagTest(0.5, "answer", both={"eval_split": "held_out"}),
    "max_seq_len": FlagTest(SHORT, "answer"),
    "batch_size": FlagTest(1, "calls", spy=FORWARD),
    "data_seed": FlagTest(7, "answer", both={"eval_fraction": 0.5}),
    "eval_data_path": FlagTest("@test.jsonl", "answer"),
    "column_map": FlagTest("chosen=rejected,rejected=chosen", "answer"),
    "json_output": FlagTest("true", "answer"),
}
FLAG_TESTS: dict[str, FlagTest] = {
    **{f"{command}.{name}": test for command in ("reward_eval", "eval") for name, test in ON_ROWS.items()},
    "sft.adam_beta1": FlagTest(0.5),
    "sft.adam_beta2": FlagTest(0.5),
    "sft.adam_eps": FlagTest(0.01),
    "sft.column_map": FlagTest("prompt=chosen"),
    "sft.data_path": FlagTest("@more.jsonl", both={"data_path": "@train.jsonl"}),
    "sft.data_seed": FlagTest(7, both={"data_split": "2,4,4"}),
    "sft.data_split": FlagTest("4,3,3"),
    "sft.dtype": FlagTest("bf16"),
    "sft.eval_data_path": FlagTest("@more.jsonl", "metrics"),
    "sft.eval_metric": FlagTest("bleu", "metrics", both={"eval_max_new_tokens": 12}),
    "sft.eval_interval": FlagTest(1, "metrics"),
    "sft.eval_iters": FlagTest(1, "metrics", both={"per_device_eval_batch_size": 1}),
    "sft.gradient_accumulation_steps": FlagTest(2),
    "sft.train_batch_size": FlagTest(8),
    "sft.learning_rate": FlagTest(0.01),
    "sft.lora_alpha": FlagTest(64, both=LORA),
    "sft.lora_dim": FlagTest(2, "files"),
    "sft.lora_dropout": FlagTest(0.5, both=LORA),
    "sft.lora_learning_rate": FlagTest(0.1, both=LORA),
    "sft.lora_module_name": FlagTest("q_proj", both=LORA),
    "sft.lr_scheduler_type": FlagTest("constant"),
    "sft.max_grad_norm": FlagTest(0.0001, both={"adam_eps": 0.01}),
    "sft.max_seq_len": FlagTest(SHORT, both={"max_seq_len": 96}),
    "sft.max_steps": FlagTest(1),
    "sft.min_learning_rate_ratio": FlagTest(0.9, both=WARM),
    "sft.mixture": FlagTest("ratio", both={"data_path": ["@train.jsonl", "@more.jsonl"]}),
    "sft.monitors": FlagTest("csv", "files"),
    "sft.model_name_or_path": FlagTest("@other", both={"model_name_or_path": "@base"}),
    "sft.num_train_epochs": FlagTest(2, "metrics", both={"max_steps": 0}),
    "sft.num_warmup_steps": FlagTest(2, both=WARM),
    "sft.only_optimize_lora": FlagTest("false", both=LORA),
    "sft.overwrite": FlagTest("true", "calls", both={"twice": True}, spy=FORWARD),
    "sft.packing": FlagTest("true", both={"data_path": "@train.jsonl"}),
    "sft.per_device_train_batch_size": FlagTest(2),
    "sft.run_dir": FlagTest("@elsewhere", "files"),
    "sft.save_adapter_only": FlagTest("true", "files", both=LORA),
    "sft.save_dtype": FlagTest("bf16", "dtype"),
    "sft.save_steps": FlagTest(1, "files", both={"keep_checkpoints": 3}),
    # A number that is given by hand keeps so many in a finished run, too.
    "sft.keep_checkpoints": FlagTest(3, "files", both={"keep_checkpoints": 2, "save_steps": 1, "max_steps": 3}),
    "sft.seed": FlagTest(99),
    "sft.sft_only_data_path": FlagTest("@more.jsonl"),
    "sft.template": FlagTest("human_assistant", both={"model_name_or_path": "@templated"}),
    "sft.chat_template_kwargs": FlagTest("greeting=Hello", both={"model_name_or_path": "@templated"}),
    "sft.train_on_prompt": FlagTest("true"),
    "sft.train_turns": FlagTest("last", both={"data_path": "@turns.jsonl", "eval_data_path": "@test.jsonl"}),
    "sft.weight_decay": FlagTest(0.9, both={"learning_rate": 0.01}),
    "reward.centering_coef": FlagTest(0.5),
    "reward.reward_loss": FlagTest("per_token"),
    "reward.balance_lengths": FlagTest("true"),
    "reward.long_pairs": FlagTest("truncate_left", both={"max_seq_len": 40}),
    "dpo.balance_lengths": FlagTest("true"),
    "dpo.beta": FlagTest(0.9),
    "dpo.desirable_weight": FlagTest(3.0, both=KTO),
    "dpo.ipo_log_ratios": FlagTest("sum", both={"method": "ipo"}),
    "dpo.label_smoothing": FlagTest(0.3),
    "dpo.long_pairs": FlagTest("truncate_left", both={"max_seq_len": 40}),
    "dpo.max_seq_len": FlagTest(SHORT, "metrics", both={"long_pairs": "truncate_left", "max_seq_len": 96}),
    "dpo.method": FlagTest("kto"),
    "dpo.take_reward_share": FlagTest("false", both={"data_split": "2,4,4"}),
    "dpo.undesirable_weight": FlagTest(3.0, both=KTO),
    "ppo.critic_warmup_steps": FlagTest(1),
    "ppo.entropy_coef": FlagTest(0.5),
    "ppo.ema_decay": FlagTest(0.1, both=EMA),
    "ppo.enable_ema": FlagTest("true", "files"),
    "ppo.dual_clip": FlagTest(1.000001, both=CLIPPED),
    "ppo.gae_lambda": FlagTest(0.1),
    "ppo.gamma": FlagTest(0.5),
    "ppo.generation_batches": FlagTest(2, "metrics"),
    "ppo.kl_coef": FlagTest(5.0, both={"ppo_epochs": 1, "max_steps": 3}),
    "ppo.kl_estimator": FlagTest("k3", "metrics", both={"max_steps": 3, "kl_coef": 5.0}),
    "ppo.kl_in_loss": FlagTest("true", "metrics", both={"kl_estimator": "k2", "max_steps": 3, "kl_coef": 5.0}),
    "ppo.kl_target": FlagTest(0.01, "metrics", both={"max_steps": 3}),
    "ppo.kl_horizon": FlagTest(10, "metrics", both=ADAPTIVE),
    "ppo.log_kl": FlagTest("true", "metrics", both={"kl_coef": 0.0}),
    "ppo.long_prompts": FlagTest("truncate_left", "metrics", both={"max_prompt_seq_len": SHORT_PROMPT}),
    "ppo.max_answer_seq_len": FlagTest(3, "metrics", both={"max_answer_seq_len": 12}),
    "ppo.max_prompt_seq_len": FlagTest(SHORT_PROMPT, "metrics", both=CUT),
    "ppo.group_baseline": FlagTest("true", both=GROUPS | {"method": "reinforce_pp"}),
    "ppo.loss_aggregation": FlagTest("sequence_mean"),
    "ppo.method": FlagTest("rloo", both=GROUPS),
    "ppo.missing_eos_penalty": FlagTest(4.0),
    "ppo.more_reward_models": FlagTest("@other-scorer"),
    "ppo.normalise_scores": FlagTest("false"),
    "ppo.num_samples_per_prompt": FlagTest(2, "metrics"),
    "ppo.old_log_probs": FlagTest("sampler", "metrics"),
    "ppo.per_device_generation_batch_size": FlagTest(2, "calls", both={"rollout_batch_size": 8}, spy=FORWARD),
    "ppo.off_policy_cap": FlagTest(0.001, "metrics", both={"off_policy_weights": "token_truncate"}),
    "ppo.off_policy_low": FlagTest(5.0, "metrics", both={"off_policy_weights": "token_mask", "off_policy_cap": 9.0}),
    "ppo.off_policy_weights": FlagTest("token_mask", "metrics"),
    "ppo.policy_clip": FlagTest(1e-06, both=CLIPPED),
    "ppo.policy_clip_high": FlagTest(5.0, both=CLIPPED | {"policy_clip": 1e-06}),
    "ppo.policy_loss": FlagTest("cispo", both=CLIPPED),
    "ppo.policy_ratio": FlagTest("sequence", both=CLIPPED),
    "ppo.ppo_epochs": FlagTest(2, both={"max_steps": 2}),
    "ppo.ratio_cap": FlagTest(1.0, both=CLIPPED | {"policy_loss": "cispo"}),
    "ppo.replace_equal_groups": FlagTest(
        "true", "metrics", both=GROUPS | {"reward_model_name_or_path": None, "reward_function": SHORT_ANSWERS}
    ),
    "ppo.reward_clip": FlagTest(0.01),
    # A penalty of 0 is what functions have by default: it would stay where the function is ignored.
    "ppo.reward_function": FlagTest("repetition", "metrics", both={"missing_eos_penalty": 0.0}),
    "ppo.returns_lambda": FlagTest(0.0),
    "ppo.reward_scaling": FlagTest("batch"),
    "ppo.reward_weight": FlagTest(3.0),
    "ppo.scale_by_group": FlagTest("false", both=GROUPS),
    "ppo.rollout_batch_size": FlagTest(8, "metrics"),
    "ppo.stop_strings": FlagTest("a", "metrics"),
    "ppo.temperature": FlagTest(0.3, "metrics"),
    "ppo.top_k": FlagTest(1, "metrics"),
    "ppo.top_p": FlagTest(0.1, "metrics"),
    "ppo.unsup_coef": FlagTest(0.1, both=TEXT),
    "ppo.unsupervised_data_path": FlagTest("@text.jsonl"),
    "ppo.value_clip": FlagTest(1e-06, both={"ppo_epochs": 3, "max_steps": 3, "learning_rate": 0.01}),
    "ppo.whiten_advantages": FlagTest("false"),
    "ppo.reward_model_name_or_path": FlagTest("@other-scorer"),
    "sft.gradient_checkpointing": FlagTest("true", "calls", spy=f"{OPT}:OPTAttention.forward"),
    "sft.attn_implementation": FlagTest("eager", "calls", spy=f"{OPT}:eager_attention_forward"),
    "sft.per_device_eval_batch_size": FlagTest(1, "metrics", both={"eval_iters": 1}),
    "sft.eval_fraction": FlagTest(0.5, "metrics", both={"eval_data_path": None}),
    "sft.data_output_path": FlagTest("@kept", "files"),
    "sft.output_dir": FlagTest("@named", "files"),
    "reward.max_seq_len": FlagTest(SHORT, "metrics", both={"long_pairs": "truncate_left", "max_seq_len": 96}),
    "reward_eval.model": FlagTest("@other-judge", "answer", both={"model": "@judge"}),
    "reward_eval.data_path":
        FlagTest("@more.jsonl", "answer", both={"data_path": "@train.jsonl", "eval_fraction": 0.5}),
    "chat.model": FlagTest("@base", "answer", both={"model": "@other"}),
    "chat.system": FlagTest("Be brief.", "answer"),
    "chat.prompt": FlagTest("Who are you?", "answer", both={"prompt": "Hello."}),
    "chat.reward_model": FlagTest("@judge", "printed"),
    "chat.dtype": FlagTest("bf16", "calls", spy=FORWARD),
    "chat.max_new_tokens": FlagTest(2, "answer"),
    "chat.temperature": FlagTest(2.0, "answer", both={"seed": 1}),
    "chat.top_p": FlagTest(0.1, "answer", both=HOT),
    "chat.top_k": FlagTest(1, "answer", both=HOT),
    "chat.repetition_penalty": FlagTest(9.0, "answer"),
    "chat.stop_strings": FlagTest([*"aeiou "], "answer", both=HOT),
    "prompt_eval.model": FlagTest(["@base", "@other"], "answer", both={"model": ["@base", "@base"]}),
    "prompt_eval.model_name_or_path_baseline": FlagTest("@other", "answer", both=PAIR),
    "prompt_eval.model_name_or_path_finetune": FlagTest("@other", "answer", both=PAIR),
    "prompt_eval.reward_model": FlagTest("@judge", "answer"),
    "prompt_eval.prompts": FlagTest("@test.jsonl", "answer"),
    "prompt_eval.language": FlagTest("Japanese", "answer"),
    "prompt_eval.output": FlagTest("@report", "files"),
    "prompt_eval.batch_size": FlagTest(1, "calls", spy=FORWARD),
    "prompt_eval.seed": FlagTest(5, "answer", both={"temperature": 2.0}),
    "prompt_eval.dtype": FlagTest("bf16", "calls", spy=FORWARD),
    "prompt_eval.max_new_tokens": FlagTest(2, "answer", both={"max_new_tokens": 12}),
    "prompt_eval.temperature": FlagTest(2.0, "answer"),
    "prompt_eval.top_p": FlagTest(0.1, "answer", both={"temperature": 2.0}),
    "prompt_eval.top_k": FlagTest(1, "answer", both={"temperature": 2.0}),
    "prompt_eval.repetition_penalty": FlagTest(9.0, "answer"),
    "prompt_eval.stop_strings": FlagTest([*"aeiou "], "answer"),
    "prompt_eval.num_beams": FlagTest(3, "answer"),
    "prompt_eval.num_return_sequences": FlagTest(2, "answer", both={"temperature": 2.0}),
    "eval.data_path": FlagTest("@more.jsonl", "answer", both={"data_path": "@train.jsonl"}),
    "eval.reward_function": FlagTest("repetition", "answer"),
    "eval.reward_model": FlagTest("@judge", "answer"),
    "eval.seed": FlagTest(5, "answer"),
    "eval.dtype": FlagTest("bf16", "calls", spy=FORWARD),
    "eval.max_new_tokens": FlagTest(2, "answer", both={"max_new_tokens": 12}),
    "eval.temperature": FlagTest(2.0, "answer"),
    "eval.top_p": FlagTest(0.1, "answer"),
    "eval.top_k": FlagTest(1, "answer"),
    "eval.stop_strings": FlagTest([*"aeiou "], "answer"),
    "eval.n": FlagTest(2, "answer"),
    "sample.model": FlagTest("@other", "answer", both={"model": "@base"}),
    "sample.data": FlagTest("@more.jsonl", "answer", both={"data": "@test.jsonl"}),
    "sample.column_map": FlagTest("prompt=chosen", "answer"),
    "sample.max_prompt_seq_len": FlagTest(SHORT_PROMPT, "answer"),
    "sample.n": FlagTest(2, "answer"),
    "sample.output": FlagTest("@answers.jsonl", "files"),
    "sample.overwrite": FlagTest("true", "calls", both={"output": "@answers.jsonl", "twice": True}, spy=FORWARD),
    "sample.write_as": FlagTest("sft", "answer"),
    "sample.batch_size": FlagTest(1, "calls", spy=FORWARD),
    "sample.seed": FlagTest(5, "answer"),
    "sample.dtype": FlagTest("bf16", "calls", spy=FORWARD),
    "sample.max_new_tokens": FlagTest(2, "answer", both={"max_new_tokens": 12}),
    "sample.temperature": FlagTest(2.0, "answer"),
    "sample.top_p": FlagTest(0.1, "answer"),
    "sample.top_k": FlagTest(1, "answer"),
    "sample.stop_strings": FlagTest([*"aeiou "], "answer"),
    "sft.deterministic": FlagTest("true", "calls", spy="torch:use_deterministic_algorithms"),
    "sft.dry_run": FlagTest("true", "files"),
    "sft.explain": FlagTest("true", "files"),
    "sft.show_data": FlagTest(2, "files"),
    "sft.target": FlagTest("1xH100-80GB", "files"),
    "sft.zero3_gather": FlagTest("layers", "calls", both=SMALL_BUCKETS, spy=FETCH),
}  # fmt: skip
FLAG_TESTS |= tests_of_other_stages(FLAG_TESTS)

# Test -> flags that it fails without.
TESTS: dict[str, str] = {
    "step3_ppo/test_distillation_runs.py::test_a_teacher_is_planned_with_its_own_flags":
        "ppo.teacher_model_name_or_path ppo.teacher_model_zero_stage ppo.teacher_model_quantization",
    "configuration/test_ds_config.py::test_stage_2": "sft.zero_stage",
    "configuration/test_ds_config.py::test_a_models_own_flags_say_what_of_it_is_in_host_memory":
        "sft.offload_optimizer sft.offload_weights",
    "configuration/test_ds_config.py::test_stage_3_with_everything_offloaded":
        "sft.offload sft.offload_parameters sft.stage3_max_live_parameters sft.sub_group_size",
    "configuration/test_ds_config.py::test_moments_in_8_bits_stay_on_the_device_below_zero_stage_3":
        "sft.optimizer_states",
    "configuration/test_ds_json.py::test_values_without_a_given_flag_win": "sft.deepspeed_config",
    "faults/test_bad_numbers.py::test_for_good_ends_with_4[sft loss]": "sft.max_bad_steps",
    "faults/test_flag_runs.py::test_debug_shows_the_traceback": "sft.debug",
    "faults/test_flag_runs.py::test_optimizer_states_leave_during_a_rollout": "ppo.offload_optimizer_during_rollout",
    "faults/test_flag_runs.py::test_progress_lines_are_as_far_apart_as_the_flag_says": "sft.print_steps",
    "faults/test_flag_runs.py::test_the_best_model_is_kept_and_not_the_last[reward]": "reward.keep_best",
    "faults/test_flag_runs.py::test_the_best_model_is_kept_and_not_the_last[sft]": "sft.keep_best",
    "run/test_logs.py::test_verbose_shows_what_libraries_print": "sft.verbose",
    "rlhf/test_eval.py::test_perplexity_is_that_of_transformers_own_loss": "eval.model",
    "rlhf/test_eval.py::test_figures_of_one_answer_to_each_prompt_are_written_for_the_report": "eval.output",
    "rlhf/test_sample.py::test_scores_and_their_weighted_sum": "sample.reward_function",
    "rlhf/test_compare.py::test_a_function_decides_the_wins_by_a_column_of_the_data": "prompt_eval.reward_function",
    "rlhf/test_compare.py::test_a_function_that_takes_too_long_ends_the_comparison": "prompt_eval.reward_timeout_s",
    "rlhf/test_compare_judge.py::test_a_judge_that_prefers_the_longer_answer_agrees_in_both_orders":
        "prompt_eval.judge_pairs",
    "rlhf/test_compare.py::test_as_many_workers_as_the_flag_says": "prompt_eval.reward_workers",
    "inference/test_sampled_scores.py::test_raw_scores_of_transformers_are_added_to_those_of_functions[1]":
        "sample.reward_model",
    "rlhf/test_sample.py::test_a_call_that_takes_too_long_gives_no_value":
        "sample.reward_timeout_s eval.reward_timeout_s",
    "rlhf/test_sample.py::test_as_many_workers_as_the_flag_says": "sample.reward_workers eval.reward_workers",
    "rewards/test_reward_pool.py::test_workers_see_no_secrets":
        "sample.reward_env reward_trial.reward_env ppo.reward_env prompt_eval.reward_env eval.reward_env "
        "chat.reward_env",
    "rewards/test_reward_limits.py::test_a_worker_has_so_much_memory_and_no_more":
        "sample.reward_worker_gib reward_trial.reward_worker_gib ppo.reward_worker_gib prompt_eval.reward_worker_gib "
        "eval.reward_worker_gib chat.reward_worker_gib",
    "rewards/test_reward_limits.py::test_without_the_flag_half_of_the_memory_is_shared[1-1]":
        "reward_trial.reward_workers",
    "rlhf/test_reward.py::test_a_call_has_all_responses_of_a_group": "reward_trial.num_samples_per_prompt",
    "checkpoints/test_resume.py::test_an_earlier_checkpoint_is_exported_by_its_name":
        "export.checkpoint export.dtype export.output",
    "training/test_push.py::test_the_finished_model_is_uploaded_whole": "sft.push_to_hub",
    "faults/test_flag_runs.py::test_the_process_group_gets_its_timeout": "sft.process_group_timeout_s",
    "faults/test_flag_runs.py::test_training_goes_on_while_a_checkpoint_is_written": "sft.save_in_background",
    "faults/test_ranks_ending.py::test_a_rank_that_hangs": "sft.rank_timeout_s",
    "faults/test_resume_changed.py::test_an_older_step_is_resumed_by_name": "sft.resume",
    "faults/test_resume_changed.py::test_changed_data_is_refused_unless_forced": "sft.force_resume",
    "generation/test_generation_runs.py::test_a_run_with_another_backend_has_the_same_numbers[static]":
        "ppo.generation_engine",
    "generation/test_generation_runs.py::test_the_inference_cache_is_released": "ppo.release_inference_cache",
    "generation/test_generation_runs.py::test_what_cannot_be_had_is_refused[unmerged adapters]":
        "ppo.merge_lora_for_generation",
    "preparation/test_automatic.py::test_settings_are_measured_once_by_real_runs": "sft.auto",
    "preparation/test_gpu_limit.py::test_a_plan_is_that_of_a_gpu_of_so_many_gib[sft]": "sft.gpu_memory_gib",
    "launching/test_launcher.py::test_restarts[1-3]": "train.max_restarts",
    "rlhf/test_known_models.py::test_every_preset_on_every_deployment[1.3b-multi_node]":
        "train.deployment_type train.reward_model",
    "launching/test_train.py::test_flags_reach_their_step":
        "train.actor_zero_stage train.reward_zero_stage train.num_gpus train.resume train.overwrite train.debug",
    "launching/test_train.py::test_launcher_flags_reach_the_launcher[exclude]": "train.exclude",
    "launching/test_train.py::test_launcher_flags_reach_the_launcher[include]":
        "train.hostfile train.include train.master_addr",
    "launching/test_train.py::test_launcher_flags_reach_the_launcher[launcher]": "train.launcher",
    "launching/test_hosts.py::test_the_check_of_hosts_is_of_every_stage_and_starts_none": "train.check",
    "launching/test_hosts.py::test_without_ssh_each_host_is_started_by_itself": "train.node_rank",
    "launching/test_train.py::test_config_file_without_sections_is_for_one_step": "train.step",
    "launching/test_train.py::test_models": "train.actor_model",
    "project/test_made_up_stage.py::test_it_is_looked_at_and_planned[3]": "train.method",
    "launching/test_train.py::test_dry_run_starts_nothing": "train.dry_run",
    "launching/test_train.py::test_port_in_use": "train.master_port",
    "launching/test_train.py::test_three_steps_in_order_with_chained_folders": "train.output_dir",
    "launching/test_train.py::test_what_step_3_would_refuse_is_refused_before_step_1":
        "ppo.offload_reference_model ppo.offload_reward_model",
    "models/test_quantized_steps.py::test_step_1_leaves_an_adapter_alone_that_is_resumed_exactly[int8]":
        "sft.quantization",
    "multi/test_ranks_decode.py::test_inference_tp_size_changes_no_rollout_of_step_3": "ppo.inference_tp_size",
    "multi/test_ranks_streaming.py::test_rollout_weights_changes_no_rollout_of_step_3": "ppo.rollout_weights",
    "rlhf/test_convert.py::test_an_actor_gives_the_same_logits[opt-full]": "convert.folders",
    "rlhf/test_convert.py::test_reward_models_whose_backbone_has_another_name[bloom]": "convert.tokenizer",
    "rlhf/test_convert.py::test_an_output_that_exists_is_left_as_it_is": "convert.overwrite",
    "rlhf/test_merge.py::test_against_a_base_that_was_not_quantised_only_rounding_differs": "merge.quantization",
    "rlhf/test_merge.py::test_merged_weights_are_the_original_ones_plus_the_product": "merge.dtype merge.folders",
    "rlhf/test_merge.py::test_the_printed_difference_is_that_of_the_two_functions": "merge.sentences",
    "rlhf/test_reward.py::test_prompts_of_messages_are_conversations[chat]": "reward_trial.column_map",
    "rlhf/test_reward.py::test_a_task_is_judged_by_the_answers_that_sample_would_write":
        "reward_trial.model reward_trial.max_answer_seq_len reward_trial.output",
    "rlhf/test_reward.py::test_answers_of_a_task_depend_on_the_seed": "reward_trial.seed",
    "rlhf/test_reward.py::test_prompts_that_training_drops_are_not_tried": "reward_trial.max_prompt_seq_len",
    "rlhf/test_reward.py::test_values_of_tokens_and_failures": "reward_trial.n reward_trial.reward_timeout_s",
    "rlhf/test_reward.py::test_values_of_two_functions":
        "reward_trial.reward_function reward_trial.data reward_trial.completion",
    "reporting/test_page.py::test_the_command_writes_where_it_is_told_and_says_where": "report.folder report.output",
    "reporting/test_report_runs.py::test_a_flag_turns_the_report_off[sft]": "sft.report",
    "rlhf/test_chat.py::test_seeds_repeat_a_sampled_reply_and_greedy_ignores_them": "chat.seed",
    "step3_ppo/test_rewarded_by_functions.py::test_calls_have_a_limit_of_time_and_processes_of_their_own":
        "ppo.reward_timeout_s ppo.reward_workers",
    "step3_ppo/test_tool_runs.py::test_tokens_of_tools_are_not_trained_on": "ppo.tools ppo.max_turns",
    "step3_ppo/test_tool_runs.py::test_an_environment_begins_and_rewards_each_response": "ppo.environment",
    "step3_ppo/test_rewarded_by_functions.py::test_some_failures_are_masked_and_counted": "ppo.max_reward_failures",
    "step3_ppo/test_rewarded_by_functions.py::test_several_samples_of_held_out_prompts": "ppo.eval_samples_per_prompt",
    "step3_ppo/test_models.py::test_a_flag_of_the_reward_model_is_of_no_other_model[zero_stage]":
        "ppo.reward_model_zero_stage",
    "step3_ppo/test_models.py::test_a_flag_of_the_reward_model_is_of_no_other_model[quantization]":
        "ppo.reward_model_quantization",
    "step3_ppo/test_models.py::test_a_flag_of_the_reward_model_is_of_no_other_model[attn_implementation]":
        "ppo.reward_model_attn_implementation",
    "step3_ppo/test_models.py::test_a_flag_of_the_reward_model_is_of_no_other_model[offload_weights]":
        "ppo.reward_model_offload_weights",
    "step1_sft/test_eval_answers.py::test_a_run_logs_the_metric_of_all_held_out_rows[causal-1]":
        "sft.eval_max_new_tokens",
}  # fmt: skip
NAMED = {key: test for test, keys in (TESTS | shared_tests()).items() for key in keys.split()}

# Flags of which a CPU shows the DeepSpeed JSON alone; tests/gpu/test_cuda_flags.py compares what stays on the device.
MEMORY = "pipeline.training.recorder:model_memory"
PARTITIONED = {"zero_stage": 3, "critic_zero_stage": 3}
ON_GPU: dict[str, FlagTest] = {
    "sft.offload": FlagTest("true", "calls", spy=MEMORY, both={"zero_stage": 2}),
    "sft.offload_parameters": FlagTest("true", "calls", spy=MEMORY, both={"zero_stage": 3}),
    "ppo.offload_reference_model": FlagTest("true", "calls", spy=MEMORY, both=PARTITIONED),
    "ppo.offload_reward_model": FlagTest("true", "calls", spy=MEMORY, both=PARTITIONED),
}

WITHOUT_EFFECT: dict[str, str] = {
    "sft.dropout": "0 is its only value",
    "sft.local_rank": "launchers pass it; the environment's LOCAL_RANK is used",
    "sft.deepspeed": "launchers pass it; DeepSpeed is always used",
} | {
    f"{stage}.{name}": f"one place reads it for all stages; see `sft.{name}`" for stage in STAGES for name in ONE_PLACE
}
WITHOUT_EFFECT |= REFUSED | {
    f"{stage}.{prefix}{name}": reason
    for stage, prefix, name, reason in (
        ("reward", "", "dropout", "0 is its only value"),
        ("dpo", "", "dropout", "0 is its only value"),
        ("ppo", "actor_", "dropout", "0 is its only value"),
        ("ppo", "critic_", "dropout", "0 is its only value"),
        ("ppo", "actor_", "lora_dropout", "stage 3 refuses any but 0"),
        ("ppo", "critic_", "lora_dropout", "stage 3 refuses any but 0"),
        *((stage, "", name, WITHOUT_EFFECT[f"sft.{name}"]) for stage in STAGES for name in ("local_rank", "deepspeed")),
    )
}
