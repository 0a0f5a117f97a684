"""The flags of DeepSpeed-Chat that are spelt otherwise here, or not needed. Its other flags keep their names."""

# DeepSpeed-Chat's spelling -> ours, where the meaning is the same.
ALIASES = {
    "per_device_training_batch_size": "per_device_train_batch_size",
    "unsupervised_dataset_name": "unsupervised_data_path",
}

END_TOKEN = "the tokenizer's own end token is trained: leave it out"
NO_DROPOUT = "dropout is always 0: leave it out"
SAMPLES = "samples are in <run_dir>/samples.jsonl: use --eval_interval"
HYBRID = "the hybrid engine is always on (--generation_engine): leave it out"

# Flags that have no counterpart, and what to do instead.
RETIRED = {
    "num_padding_at_beginning": "lengths are known, padding is never counted: leave it out",
    "add_eot_token": END_TOKEN,
    "eot_token": END_TOKEN,
    "compute_fp32_loss": "losses, log-probabilities and scores are always fp32: leave it out",
    "print_loss": "use --print_steps",
    "dropout": NO_DROPOUT,
    "actor_dropout": NO_DROPOUT,
    "critic_dropout": NO_DROPOUT,
    "tensorboard_path": "curves are in <run_dir>/tensorboard: use --run_dir",
    "enable_hybrid_engine": HYBRID,
    "unpin_actor_parameters": HYBRID,
    "tp_gather_partition_size": "weights are gathered a layer at a time: leave it out",
    "align_overflow": "actor and critic always step together: leave it out",
    "print_answers": SAMPLES,
    "print_answers_interval": SAMPLES,
    "preprocessing_num_workers": "one process a node builds the data cache: leave it out",
    "enable_test_mode": "use --max_steps",
    "test_stop_step": "use --max_steps",
    "unsupervised_dataset_config_name": "give --unsupervised_data_path a hub id or a file",
    "enable_mixed_precision_lora": "not supported: use --actor_lora_dim with --actor_zero_stage 3",
    "deepscale": "use --deepspeed",
    "deepscale_config": "use --deepspeed_config",
}
