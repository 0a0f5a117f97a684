"""Facts about DeepSpeed-Chat: the flags of its programs, and the arguments that its published scripts give to them.

Written down from its documentation; `MODEL`, `CRITIC` and `OUT` stand for what a script's caller names.
"""

RM_STATIC = "--data_path Dahoas/rm-static --data_split 2,4,4"
FOUR_SETS = (
    "--data_path Dahoas/rm-static Dahoas/full-hh-rlhf Dahoas/synthetic-instruct-gptj-pairwise "
    "yitingxie/rlhf-reward-datasets --data_split 2,4,4"
)
CHINESE = "wangrui6/Zhihu-KOL Cohere/miracl-zh-queries-22-12 Hello-SimpleAI/HC3-Chinese mkqa-Chinese"
JAPANESE = "mkqa-Japanese Cohere/miracl-ja-queries-22-12 lmqg/qg_jaquad lmqg/qag_jaquad"
USUAL = "--max_seq_len 512 --lr_scheduler_type cosine --num_warmup_steps 0 --seed 1234 --deepspeed --output_dir OUT"
BOARD = "--enable_tensorboard --tensorboard_path OUT"
LORA = "--lora_dim 128 --lora_module_name decoder.layers."
LLAMA_LORA = "--lora_dim 128 --lora_module_name layers."


def supervised(model: str, data: str, batch: int, rate: float, epochs: int, more: str, decay: float = 0.0) -> str:
    """Return the arguments of a script of steps 1 and 2 that names all of them; rates as Python writes them."""
    sizes = f"--per_device_train_batch_size {batch} --per_device_eval_batch_size {batch} --num_train_epochs {epochs}"
    rates = f"--learning_rate {rate} --weight_decay {decay} --gradient_accumulation_steps 1"
    return f"--model_name_or_path {model} {data} {sizes} {rates} {USUAL} {more}"


def ppo(batch: int, zero: int, more: str, *, accumulation: int = 1, rate: float = 9.65e-6, decay: float = 0.0) -> str:
    """Return the arguments of a script of step 3 that names all of them."""
    return (
        f"{RM_STATIC} --actor_model_name_or_path MODEL --critic_model_name_or_path CRITIC --num_padding_at_beginning 1 "
        f"--per_device_generation_batch_size {batch} --per_device_training_batch_size {batch} --generation_batches 1 "
        f"--ppo_epochs 1 --max_answer_seq_len 256 --max_prompt_seq_len 256 --actor_learning_rate {rate} "
        f"--critic_learning_rate 5e-6 --actor_weight_decay {decay} --critic_weight_decay {decay} --num_train_epochs 1 "
        f"--lr_scheduler_type cosine --gradient_accumulation_steps {accumulation} --num_warmup_steps 100 --deepspeed "
        f"--seed 1234 --actor_zero_stage {zero} --critic_zero_stage {zero} --actor_dropout 0.0 --output_dir OUT {more}"
    )


HYBRID = "--enable_hybrid_engine"
ACTOR_LORA = "--actor_lora_dim 128 --actor_lora_module_name decoder.layers."
BOTH = "--actor_gradient_checkpointing --critic_gradient_checkpointing"
LLAMA_PAIR = (
    f"{BOTH} --offload_reference_model --actor_lora_dim 64 --critic_lora_dim 64 "
    "--actor_lora_module_name layers. --critic_lora_module_name layers."
)

# Script -> (step, GPUs, arguments).
SCRIPTS: dict[str, tuple[int, int, str]] = {
    "step1/single_gpu/1.3b": (
        1, 1, "--model_name_or_path facebook/opt-1.3b --gradient_accumulation_steps 8 --lora_dim 128 --zero_stage 0 "
        f"--deepspeed --output_dir OUT {BOARD}",
    ),
    "step1/single_gpu/6.7b_lora": (1, 1, supervised(
        "facebook/opt-6.7b", FOUR_SETS, 8, 1e-3, 16, f"{LORA} --zero_stage 0 --gradient_checkpointing")),
    "step1/single_node/1.3b": (1, 8, supervised(
        "facebook/opt-1.3b", FOUR_SETS, 8, 9.65e-6, 16, f"--zero_stage 2 {BOARD}")),
    "step1/single_node/1.3b_lora": (1, 8, supervised(
        "facebook/opt-1.3b", FOUR_SETS, 8, 1e-3, 16, f"{LORA} --only_optimize_lora --zero_stage 0", 0.1)),
    "step1/single_node/6.7b": (1, 8, supervised(
        "facebook/opt-6.7b", FOUR_SETS, 6, 9.65e-6, 16, "--gradient_checkpointing --zero_stage 3")),
    "step1/single_node/13b": (1, 8, supervised(
        "facebook/opt-13b", FOUR_SETS, 4, 1e-4, 16, f"--gradient_checkpointing --zero_stage 3 {LORA}")),
    "step1/single_node/30b_lora": (1, 8, supervised(
        "facebook/opt-30b", FOUR_SETS, 4, 9.65e-6, 16, f"--gradient_checkpointing --zero_stage 3 {LORA}")),
    "step1/multi_node/66b": (1, 64, supervised(
        "facebook/opt-66b", FOUR_SETS, 4, 1e-4, 2, f"--gradient_checkpointing --zero_stage 3 {LORA}", 0.1)),
    "step1/llama2/7b": (1, 8, supervised(
        "meta-llama/Llama-2-7b-hf", FOUR_SETS, 4, 9.65e-6, 4, "--gradient_checkpointing --zero_stage 3")),
    "step1/llama2/7b_lora": (1, 8, supervised(
        "meta-llama/Llama-2-7b-hf", FOUR_SETS, 4, 9.65e-6, 4, f"--gradient_checkpointing --zero_stage 3 {LLAMA_LORA}")),
    "step1/other_language/chinese": (1, 8, supervised(
        "bigscience/bloom-1b1", f"--data_path {CHINESE} --data_split 10,0,0", 8, 9.65e-6, 16, "--zero_stage 2")),
    "step1/other_language/japanese": (1, 8, supervised(
        "sberbank-ai/mGPT", f"--data_path {JAPANESE} --data_split 10,0,0", 8, 9.65e-6, 16, "--zero_stage 2")),
    "step1/sweep": (1, 8, supervised(
        "facebook/opt-1.3b", FOUR_SETS, 8, 1e-3, 16,
        f"--zero_stage 3 --offload {LORA} --only_optimize_lora --print_loss", 0.1)),
    "step2/single_gpu/350m": (
        2, 1, "--model_name_or_path facebook/opt-350m --num_padding_at_beginning 1 --weight_decay 0.1 --dropout 0.0 "
        f"--gradient_accumulation_steps 4 --zero_stage 0 --deepspeed --output_dir OUT {BOARD}",
    ),
    "step2/single_node/350m": (2, 8, supervised(
        "facebook/opt-350m", FOUR_SETS, 4, 5e-5, 1, "--num_padding_at_beginning 1 --dropout 0.0 --zero_stage 0", 0.1)),
    "step2/multi_node/350m": (2, 64, supervised(
        "facebook/opt-350m", FOUR_SETS, 2, 5e-5, 1, "--num_padding_at_beginning 1 --dropout 0.0 --zero_stage 0", 0.1)),
    "step2/llama2/7b": (2, 8, supervised(
        "meta-llama/Llama-2-7b-hf", RM_STATIC, 8, 9.65e-6, 1,
        "--num_padding_at_beginning 0 --gradient_checkpointing --zero_stage 3 --offload", 0.1)),
    "step2/llama2/7b_lora": (2, 8, supervised(
        "meta-llama/Llama-2-7b-hf", RM_STATIC, 8, 9.65e-6, 1,
        f"--num_padding_at_beginning 0 --gradient_checkpointing --zero_stage 3 --offload {LLAMA_LORA}", 0.1)),
    "step2/sweep": (2, 8, supervised(
        "facebook/opt-350m", FOUR_SETS, 4, 5e-5, 1,
        "--num_padding_at_beginning 1 --disable_dropout --zero_stage 2 --offload", 0.1)),
    "step3/single_gpu/1.3b": (
        3, 1, "--actor_model_name_or_path MODEL --critic_model_name_or_path CRITIC --actor_zero_stage 0 "
        "--critic_zero_stage 0 --num_padding_at_beginning 1 --gradient_accumulation_steps 2 --deepspeed "
        f"--actor_lora_dim 128 {HYBRID} --actor_gradient_checkpointing --actor_dropout 0.0 --output_dir OUT",
    ),
    "step3/single_gpu/6.7b_lora": (3, 1, ppo(8, 0, f"{HYBRID} {ACTOR_LORA} {BOTH}", accumulation=16, rate=5e-4)),
    "step3/single_node/1.3b": (3, 8, ppo(4, 2, f"{HYBRID} --enable_ema {BOARD}")),
    "step3/single_node/1.3b_lora": (3, 8, ppo(4, 2, f"{HYBRID} {ACTOR_LORA}")),
    "step3/single_node/6.7b": (3, 8, ppo(4, 3, f"{HYBRID} --actor_gradient_checkpointing", decay=0.1)),
    "step3/single_node/13b": (3, 8, ppo(
        16, 3, f"{HYBRID} --inference_tp_size 2 --actor_gradient_checkpointing {ACTOR_LORA}", rate=5e-4)),
    "step3/single_node/30b_lora": (3, 8, ppo(4, 3, f"{HYBRID} --actor_gradient_checkpointing {ACTOR_LORA}", rate=5e-4)),
    "step3/multi_node/66b": (3, 64, ppo(
        4, 3, f"{HYBRID} --inference_tp_size 8 --tp_gather_partition_size 4 --actor_gradient_checkpointing "
        f"--disable_actor_dropout {ACTOR_LORA}", rate=5e-4, decay=0.1)),
    "step3/llama2/7b": (3, 8, ppo(1, 3, f"{HYBRID} {BOTH} --offload_reference_model", decay=0.1)),
    "step3/llama2/7b_lora": (3, 8, ppo(1, 3, f"{HYBRID} {LLAMA_PAIR}", decay=0.1)),
    "step3/llama2/7b_mixz": (3, 8, ppo(1, 3, f"--enable_mixed_precision_lora {LLAMA_PAIR}", decay=0.1)),
    "step3/sweep": (3, 8, ppo(
        4, 3, f"--print_answers {HYBRID} --offload {ACTOR_LORA} --enable_test_mode --test_stop_step 5")),
}  # fmt: skip

# Arguments of those scripts that are refused: what they ask for is not offered.
REFUSED = {
    "step3/llama2/7b_mixz": ["enable_mixed_precision_lora"],
    "step3/sweep": ["enable_test_mode", "test_stop_step"],
    "step3/single_gpu/6.7b_lora": ["per_device_generation_batch_size"],
}

COMMON = """data_path data_split data_output_path per_device_train_batch_size num_train_epochs
    gradient_accumulation_steps lr_scheduler_type num_warmup_steps output_dir seed local_rank offload dtype
    only_optimize_lora compute_fp32_loss enable_tensorboard tensorboard_path add_eot_token deepspeed deepspeed_config
    deepscale deepscale_config"""
ONE_MODEL = """model_name_or_path per_device_eval_batch_size max_seq_len learning_rate weight_decay
    gradient_checkpointing dropout zero_stage lora_dim lora_module_name lora_learning_rate"""
# Program -> its flags; `dpo` has no counterpart, and its own flags are answered by stage 2.
FLAGS = {
    "sft": f"{COMMON} {ONE_MODEL} sft_only_data_path eot_token print_loss",
    "reward": f"{COMMON} {ONE_MODEL} num_padding_at_beginning eval_interval eval_iters",
    "dpo": f"{COMMON} {ONE_MODEL} beta label_smoothing offload_reference_model print_loss",
    "ppo": f"""{COMMON} unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef actor_model_name_or_path
        critic_model_name_or_path num_padding_at_beginning per_device_generation_batch_size
        per_device_training_batch_size generation_batches ppo_epochs max_prompt_seq_len max_answer_seq_len
        actor_learning_rate critic_learning_rate actor_weight_decay critic_weight_decay preprocessing_num_workers
        enable_hybrid_engine unpin_actor_parameters release_inference_cache inference_tp_size tp_gather_partition_size
        offload_reference_model offload_reward_model actor_zero_stage critic_zero_stage actor_gradient_checkpointing
        critic_gradient_checkpointing actor_dropout critic_dropout actor_lora_dim critic_lora_dim
        actor_lora_module_name critic_lora_module_name actor_lora_learning_rate critic_lora_learning_rate enable_ema
        enable_mixed_precision_lora align_overflow print_answers print_answers_interval enable_test_mode
        test_stop_step per_device_mini_train_batch_size generation_batch_numbers disable_actor_dropout
        disable_critic_dropout""",
    "train": "step actor_model reward_model actor_zero_stage reward_zero_stage output_dir deployment_type",
    "chat": "path max_new_tokens",
    "prompt_eval": """model_name_or_path_baseline model_name_or_path_finetune num_beams num_beam_groups top_k
        penalty_alpha num_return_sequences max_new_tokens language add_eot_token""",
    "rw_eval": "model_name_or_path num_padding_at_beginning add_eot_token",
}
