"""Make the page `coming_from/trl.md`: its hand-written text, and the table of TRL's names from the names of the flags.

`page` is called when the site is built. Names that the code recognises come from the fields of the flags
(`pipeline/configuration/names.py`); classes, columns and further flags are listed here, and a flag that does not exist
is an error.
"""

from collections.abc import Iterator
from pathlib import Path

from pipeline.configuration.names import Names
from rlhf.stages import STAGES
from rlhf.train_config import TrainConfig
from website.tables import escaped, flag_name, row

HAND_TEXT = Path(__file__).resolve().parent.parent / "docs" / "coming_from" / "trl.md"
MARKER = "The table of all names is on the site that `make site` writes."  # stands where the table comes
# Recognised names that are not TRL's but LLaMA-Factory's, veRL's or ours.
OTHERS = frozenset(
    "batch_size columns cutoff_len dataset dynamic_sampling entropy_coeff entropy_loss_coef epochs eval_dataset "
    "flash_attn generation_max_length kto_chosen_weight kto_rejected_weight lora_learning_rate lora_rank lr "
    "mix_strategy per_device_batch_size predict_with_generate pref_beta pref_loss val_size zero_stage".split()
)
TRAINERS = (
    ("SFTTrainer, SFTConfig", "`--step 1`", "section `sft`"),
    ("RewardTrainer, RewardConfig", "`--step 2`", "section `reward`; the score is read at the last token"),
    ("PPOTrainer, PPOConfig", "`--step 3 --method ppo`", "section `ppo`; TRL 1.16 has none any more"),
    ("GRPOTrainer, GRPOConfig", "`--step 3 --method grpo`", "section `ppo`"),
    ("RLOOTrainer, RLOOConfig", "`--step 3 --method rloo`", "section `ppo`"),
    ("DPOTrainer, DPOConfig", "`--step 3 --method dpo`", "section `dpo`; IPO is `--method ipo`"),
    ("DistillationTrainer, GKDTrainer", "`--step 3 --method distill`", "section `ppo`, `--ppo.teacher-model`"),
    ("KTOTrainer, KTOConfig", "`--step 3 --method kto`", "section `dpo`"),
    ("train_dataset", "`--data-path`", "hub ids, files or folders, each with an optional weight"),
    ("processing_class", "the model's tokenizer", "template: `--template`, or `chat_template.jinja` in its folder"),
    ("callbacks", "none", "`--monitors` writes metrics to TensorBoard, CSV or W&B"),
)
COLUMNS = (
    ("prompt, completion", "the same", "also `response`, `output`"),
    ("messages", "the same", "also `conversations` (ShareGPT)"),
    ("prompt, chosen, rejected", "the same", "also whole conversations in `chosen` and `rejected`"),
    ("prompt, completion, label", "the same", "for `--method kto`"),
    ("text", "the same", "SFT"),
    ("tools", "the same", "given to the chat template; turns that call a tool are left out"),
    ("images", "none", "rows with images are left out and counted"),
)
# TRL's names that no field of a flag lists -> (name of our flag, a remark).
FLAGS = {
    "eval_strategy": ("eval_interval", "steps between evaluations; 0: before and after training"),
    "load_best_model_at_end": ("keep_best", "stages 1 and 2"),
    "completion_only_loss": ("train_on_prompt", "the opposite; off, so that responses alone are trained"),
    "assistant_only_loss": ("train_turns", "all or the last of a conversation's assistant turns"),
    "center_rewards_coefficient": ("centering_coef", "the reward model"),
    "reward_weights": ("reward_function", "behind each name: `rewards.py:short:0.5`"),
    "steps_per_generation": ("rollout_batch_size", "this many steps times `--train-batch-size`"),
    "num_iterations": ("ppo_epochs", "passes over one rollout"),
    "epsilon_high": ("policy_clip_high", "clip range above 1"),
    "delta": ("dual_clip", "ratio above which a token of negative advantage has no gradient"),
    "importance_sampling_level": ("policy_ratio", "`sequence` is GSPO"),
    "scale_rewards": ("scale_by_group", "`false` is Dr. GRPO"),
    "vllm_importance_sampling_mode": ("off_policy_weights", "for any sampler"),
    "vllm_importance_sampling_clip_max": ("off_policy_cap", "largest of these weights"),
    "peft_config": ("lora_dim", "`--lora-alpha`, `--lora-dropout`, `--lora-module-name`"),
}
SAME = (
    "num_train_epochs max_steps weight_decay lr_scheduler_type max_grad_norm seed output_dir save_steps "
    "per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing packing temperature top_p top_k "
    "dtype lora_alpha lora_dropout label_smoothing desirable_weight undesirable_weight push_to_hub entropy_coef"
).split()
# Remarks that replace the first words of a flag's meaning.
REMARKS = {
    "auto_find_batch_size": "`measure`: by three test steps with each of the plan's best three settings",
    "beta": "weight of the KL penalty of GRPO; in DPO, IPO and KTO it is `--beta` here too",
    "generation_batch_size": "responses of a rollout over all GPUs",
    "dataset_name": "hub ids, files or folders",
    "eval_steps": "steps between evaluations; 0: before and after training",
    "learning_rate": "in stages 1 and 2 and in DPO: `--learning-rate`",
    "load_in_4bit": "`nf4`",
    "load_in_8bit": "`int8`",
    "loss_type": "of DPOTrainer: `dpo`, `ipo`; of GRPOTrainer see `--loss-aggregation`, `--policy-loss`",
    "max_new_tokens": "of SFT's evaluation; of a rollout",
    "report_to": "`tensorboard`, `csv`, `wandb`",
    "resume_from_checkpoint": "`auto` without the flag: the newest valid checkpoint",
}
LONGEST = 90  # characters of a remark
NO_FLAG = {
    "use_vllm": "the training weights sample: `--generation-engine`",
    "trust_remote_code": "code from the hub is never run",
    "whiten_rewards": "rewards are not whitened; advantages are: `--whiten-advantages`",
    "optim": "AdamW; `--optimizer-states 8bit` rounds its moments",
    "fsdp": "DeepSpeed's ZeRO: `--actor-zero-stage`",
    "use_liger_kernel": "the project's own kernels, on GPUs",
}


def recognised() -> Iterator[tuple[str, str, str]]:
    """Yield (TRL's name, our flags, remark) of each name of TRL that a field of a flag knows."""
    ours: dict[str, dict[str, str]] = {}
    for stage in STAGES:
        names = Names(stage.config)
        for name, flags in names.other_tools.items():
            if name not in OTHERS:
                flags_of = ours.setdefault(name, {})
                flags_of |= {flag: names.table[flag].info.description or "" for flag in flags if flag not in flags_of}
    for name in sorted(ours):
        meaning = next(iter(ours[name].values())).partition(";")[0].partition(" (")[0]
        remark = REMARKS.get(name, meaning if len(meaning) <= LONGEST else "")
        yield name, ", ".join(map(flag_name, ours[name])), remark


def listed() -> Iterator[tuple[str, str, str]]:
    """Yield the rows of FLAGS, SAME and NO_FLAG. Raises KeyError for a flag of ours that does not exist."""
    existing = {name for stage in STAGES for name in Names(stage.config).flag_of} | Names(TrainConfig).flag_of.keys()
    given = [flag for flag, _ in FLAGS.values()]
    if missing := [name for name in (*given, *SAME) if name not in existing]:
        raise KeyError(f"website/trl.py: no such flags: {', '.join(missing)}")
    for name, (flag, remark) in FLAGS.items():
        yield name, flag_name(flag), remark
    yield ", ".join(SAME), "the same name", "in stage 3 a model's own may have `actor_` or `critic_` in front"
    for name, remark in NO_FLAG.items():
        yield name, "none", remark


def table() -> str:
    """Return the table, with a row for each class, column or flag."""
    lines = ["| TRL | here | remark |", "|---|---|---|"]
    for names, ours, remark in (*TRAINERS, *COLUMNS, *recognised(), *listed()):
        theirs = ", ".join(f"`{name}`" if name.isidentifier() else name for name in names.split(", "))
        lines.append(row(theirs, ours, escaped(remark)))
    return "\n".join(lines)


def page() -> str:
    """Return the whole page as Markdown."""
    text = HAND_TEXT.read_text(encoding="utf-8")
    if text.count(MARKER) != 1:
        raise ValueError(f"{HAND_TEXT}: expected one line {MARKER}, got {text.count(MARKER)}")
    return text.replace(MARKER, table())
