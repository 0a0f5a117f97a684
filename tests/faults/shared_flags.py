"""Flags that stages share, each tried in every stage and for every role that has it."""

from typing import Any

STAGES = ("reward", "ppo", "dpo")  # beside stage 1, whose tests are in flag_tests.py

# Seen in built engines and DeepSpeed JSONs: the case of tests/training/test_stage_flags.py, and its flags.
ENGINES = "training/test_stage_flags.py::test_the_engine_of_a_role_has_its_own_flags"
ROLE_JSON = "training/test_stage_flags.py::test_the_json_of_a_role_has_its_own_flags"
ALL_JSON = "training/test_stage_flags.py::test_the_jsons_of_all_that_is_trained_have_the_flags_of_all"
OPTIMIZERS = "training/test_stage_flags.py::test_the_optimizers_of_all_that_is_trained_have_the_flags_of_all"
ONLY_LORA = "training/test_stage_flags.py::test_only_adapters_learn_unless_the_flag_says_otherwise"
OF_A_ROLE: dict[str, str] = {
    f"{ENGINES}[weights-{{0}}]":
        "learning_rate weight_decay gradient_checkpointing attn_implementation model_name_or_path",
    f"{ENGINES}[adapters-{{0}}]": "lora_dim lora_alpha lora_module_name lora_learning_rate quantization",
    f"{ROLE_JSON}[ZeRO-2-{{0}}]": "zero_stage offload_optimizer",
    f"{ROLE_JSON}[ZeRO-3-{{0}}]": "offload_weights",
}  # fmt: skip
OF_A_STAGE: dict[str, str] = {
    f"{ALL_JSON}[ZeRO-2-{{0}}]":
        "offload max_grad_norm per_device_train_batch_size gradient_accumulation_steps",
    f"{ALL_JSON}[ZeRO-3-{{0}}]":
        "stage3_max_live_parameters sub_group_size offload_parameters",
    f"{OPTIMIZERS}[{{0}}]": "adam_beta1 adam_beta2 adam_eps lr_scheduler_type num_warmup_steps min_learning_rate_ratio",
    f"{ONLY_LORA}[false-{{0}}]": "only_optimize_lora",
}  # fmt: skip
ROLES = {"reward-model": "reward.", "ppo-actor": "ppo.actor_", "ppo-critic": "ppo.critic_", "dpo-model": "dpo."}

# Flags whose test in stage 1 also runs in the others, where it is not refused; what it sets otherwise there.
SHARED = """
    column_map data_path data_seed data_split dtype eval_data_path eval_fraction eval_interval eval_iters max_steps
    mixture monitors num_train_epochs overwrite run_dir save_adapter_only save_dtype save_steps keep_checkpoints seed
    template chat_template_kwargs train_batch_size per_device_eval_batch_size data_output_path output_dir deterministic
    dry_run explain show_data target zero3_gather
""".split()
OTHERWISE: dict[str, dict[str, Any]] = {"ppo.train_batch_size": {"both": {"per_device_generation_batch_size": 8}}}
REFUSED = {"reward.save_adapter_only": "a reward model is always saved whole"}

# Flags that one place reads for all stages, none of whose packages names them: stage 1's test is that of all.
ONE_PLACE = """
    optimizer_states deepspeed_config max_bad_steps save_in_background print_steps process_group_timeout_s
    rank_timeout_s auto gpu_memory_gib debug push_to_hub verbose
""".split()
# Read by what restores a stage's checkpoint, and by what ends its run.
RESUMED: dict[str, str] = {
    "faults/test_resume_changed.py::test_changed_data_is_refused_unless_forced[{0}]": "force_resume",
    "faults/test_resume_changed.py::test_an_older_step_is_resumed_by_name[{0}]": "resume",
    "reporting/test_report_runs.py::test_a_flag_turns_the_report_off[{0}]": "report",
}
# Tools of commands beside training.
OF_TOOLS: dict[str, str] = {
    "rlhf/test_trial_and_chat_tools.py::test_a_trial_says_what_was_called":
        "reward_trial.tools reward_trial.max_turns",
    "rlhf/test_trial_and_chat_tools.py::test_a_chat_shows_the_results_of_calls": "chat.tools chat.max_turns",
    "rlhf/test_trial_and_chat_tools.py::test_an_environment_opens_and_rewards_a_reply":
        "chat.environment reward_trial.environment",
    "rlhf/test_trial_and_chat_tools.py::test_the_processes_of_a_chats_tools_have_its_limits":
        "chat.reward_timeout_s chat.reward_workers",
}  # fmt: skip


def shared_tests() -> dict[str, str]:
    """Return test -> flags that it fails without, as flag_tests.py has them."""
    found: dict[str, list[str]] = {}
    for case, prefix in ROLES.items():
        for test, names in OF_A_ROLE.items():
            found[test.format(case)] = [f"{prefix}{name}" for name in names.split()]
    for stage in STAGES:
        for test, names in (OF_A_STAGE | RESUMED).items():
            found[test.format(stage)] = [f"{stage}.{name}" for name in names.split()]
    for stage in ("reward", "dpo"):  # PPO has no dropout, and refuses it
        found[f"{ENGINES}[adapters-{stage}-model]"].append(f"{stage}.lora_dropout")
    return OF_TOOLS | {test: " ".join(keys) for test, keys in found.items()}


def tests_of_other_stages(first: dict[str, Any]) -> dict[str, Any]:
    """Return the tests of the other stages, which are those of stage 1."""
    return {
        f"{stage}.{name}": first[f"sft.{name}"]._replace(**OTHERWISE.get(f"{stage}.{name}", {}))
        for stage in STAGES
        for name in SHARED
        if f"{stage}.{name}" not in REFUSED
    }
