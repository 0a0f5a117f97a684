"""The runs whose memory is planned before they are made (plan_runs.py), by their stages' command lines.

Model flags name shapes of random_models.SHAPES. Runs marked held-out are of models and numbers of GPUs that no constant
of the planner knows.
"""

from dataclasses import dataclass, replace
from typing import Literal

TIMED_STEPS, STEPS = 5, 3
ADAPTERS = "--actor_lora_dim 64 --save_adapter_only true"
CHECKPOINTED = "--actor_gradient_checkpointing true --critic_gradient_checkpointing true"

# Planners of planned.py: with the kernels of the first runs, before logits were stored, before groups shared their
# prompts, and as runs are now.
PlannerName = Literal["of then", "without logits", "without sharing", "now"]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run by its stage's command line: model flags name shapes of random_models.SHAPES.

    name: of its row in the table.
    section: its stage's.
    words: the command line, without folders.
    gpus: how many it takes.
    held_out: see the top of the file.
    alone: nothing else is on its GPUs, and its times are compared. A run whose memory decides whether it keeps its KV
        cache has to be.
    planner: the planner that has the kernels and the memory of its time.
    chooses: it takes what the plan chooses (choices.py); else the defaults of flags that are `auto`.
    """

    name: str
    section: str
    words: str
    gpus: int = 1
    held_out: bool = False
    alone: bool = False
    planner: PlannerName = "of then"
    chooses: bool = False

    @property
    def steps(self) -> int:
        return TIMED_STEPS if self.alone else STEPS


def sft(model: str, zero_stage: int, micro: int, rest: str = "") -> str:
    return f"--model_name_or_path {model} {supervised(zero_stage, micro)} --train_on_prompt true {rest}"


def reward(model: str, zero_stage: int, micro: int, rest: str = "") -> str:
    return f"--model_name_or_path {model} {supervised(zero_stage, micro)} --long_pairs truncate_left {rest}"


def supervised(zero_stage: int, micro: int) -> str:
    return f"--zero_stage {zero_stage} --per_device_train_batch_size {micro} --max_seq_len 512 --dtype bf16"


def ppo(actor: str, critic: str, zero_stage: int, micro: int, rest: str = "") -> str:
    return (
        f"--actor_model_name_or_path {actor} --critic_model_name_or_path {critic} --actor_zero_stage {zero_stage} "
        f"--critic_zero_stage {zero_stage} --per_device_generation_batch_size 32 --per_device_train_batch_size {micro} "
        "--gradient_accumulation_steps 2 --max_prompt_seq_len 256 --max_answer_seq_len 256 --dtype bf16 "
        f"--long_prompts truncate_left --release_inference_cache false --old_log_probs trainer {rest}"
    )


def held_out(name: str, section: str, words: str, *, rows: str, lengths: str, alone: bool = False) -> PlannedRun:
    """A run on one GPU whose family, lengths, batches and generation sizes no run had before it was planned.

    rows: micro-batch and accumulation, of PPO prompts before them. lengths: tokens of rows, or of prompt and response.
    """
    *prompts, micro, accumulation = rows.split()
    words += f" --per_device_train_batch_size {micro} --gradient_accumulation_steps {accumulation} --dtype bf16"
    if section == "ppo":
        prompt, answer = lengths.split()
        words += f" --per_device_generation_batch_size {prompts[0]} --long_prompts truncate_left"
        words += f" --max_prompt_seq_len {prompt} --max_answer_seq_len {answer} --old_log_probs trainer"
    else:
        words += f" --max_seq_len {lengths} " + ("--train_on_prompt true" if section == "sft" else LONG_PAIRS)
    return PlannedRun(name, section, words, held_out=True, alone=alone)


def of_two(actor: str, critic: str, zero_stage: int, rest: str = "") -> str:
    return (
        f"--actor_model_name_or_path {actor} --critic_model_name_or_path {critic} --actor_zero_stage {zero_stage} "
        f"--critic_zero_stage {zero_stage} {rest}"
    )


LONG_PAIRS = "--long_pairs truncate_left"
# Planned before any of them was run.
NEXT = (
    held_out("SFT, Qwen3-0.6B, ZeRO-2, 12 rows of 384", "sft", "--model_name_or_path qwen3-0.6b --zero_stage 2",
             rows="12 1", lengths="384"),
    held_out("SFT, Pythia-1.4B, ZeRO-0, LoRA 32, 6 rows of 896", "sft",
             "--model_name_or_path pythia-1.4b --zero_stage 0 --lora_dim 32", rows="6 3", lengths="896"),
    held_out("SFT, OLMo-2-1B, ZeRO-3, checkpointing, 20 rows of 640", "sft",
             "--model_name_or_path olmo2-1b --zero_stage 3 --gradient_checkpointing true", rows="20 2", lengths="640"),
    held_out("reward, Pythia-410M, ZeRO-1, 10 pairs of 320", "reward",
             "--model_name_or_path pythia-410m --zero_stage 1", rows="10 1", lengths="320"),
    held_out("reward, Qwen3-1.7B, ZeRO-2, checkpointing, 3 pairs of 768", "reward",
             "--model_name_or_path qwen3-1.7b --zero_stage 2 --gradient_checkpointing true", rows="3 5", lengths="768"),
    held_out("reward, Mistral-7B int8 LoRA 16, ZeRO-0, 2 pairs of 704", "reward",
             "--model_name_or_path mistral-7b --zero_stage 0 --lora_dim 16 --quantization int8", rows="2 2",
             lengths="704"),
    held_out("PPO, Pythia-1.4B and 410M, ZeRO-2, 24 rows of 128 + 384", "ppo",
             of_two("pythia-1.4b", "pythia-410m", 2), rows="24 12 2", lengths="128 384", alone=True),
    held_out("PPO, Qwen3-1.7B and 0.6B, ZeRO-0, 48 rows of 448 + 128", "ppo", of_two("qwen3-1.7b", "qwen3-0.6b", 0),
             rows="48 6 8", lengths="448 128", alone=True),
    held_out("PPO, Mistral-7B LoRA 32 and Pythia-410M, ZeRO-2, 96 rows of 192 + 832", "ppo",
             of_two("mistral-7b", "pythia-410m", 2, "--actor_lora_dim 32 --save_adapter_only true"), rows="96 12 8",
             lengths="192 832", alone=True),
    held_out("PPO, OLMo-2-1B and Qwen3-0.6B, ZeRO-3, 480 rows of 320 + 704", "ppo",
             of_two("olmo2-1b", "qwen3-0.6b", 3), rows="480 10 48", lengths="320 704", alone=True),
    held_out("PPO, Qwen3-1.7B and Pythia-410M, ZeRO-1, optimizers move, 40 rows of 64 + 960", "ppo",
             of_two("qwen3-1.7b", "pythia-410m", 1, "--offload_optimizer_during_rollout true"), rows="40 5 8",
             lengths="64 960", alone=True),
    held_out("PPO, Pythia-1.4B and Qwen3-0.6B, ZeRO-2, checkpointing, 3 samples of 28 prompts, 384 + 576", "ppo",
             of_two("pythia-1.4b", "qwen3-0.6b", 2, f"{CHECKPOINTED} --num_samples_per_prompt 3 --top_p 0.9"),
             rows="28 14 6", lengths="384 576", alone=True),
)  # fmt: skip


def by_method(method: str, name: str, words: str, *, rows: str, lengths: str) -> PlannedRun:
    """A run of stage 3 that a function rewards, see `held_out`; without a reward model where it names none.

    It shares its GPU: the KV cache stays, whatever is free. It has a reference, as all had when these were measured.
    """
    words = f"--method {method} --reward_function repetition --log_kl true --release_inference_cache false {words}"
    run = held_out(f"{method.upper()}, {name}", "ppo", words, rows=rows, lengths=lengths)
    return replace(run, planner="without logits")


# Planned before any of them was run. Each fits an H100.
METHODS = (
    by_method("ppo", "Qwen2.5-0.5B, its critic made of it, ZeRO-2, 40 rows of 256 + 512",
              "--actor_model_name_or_path qwen2.5-0.5b --actor_zero_stage 2 --critic_zero_stage 2",
              rows="40 8 5", lengths="256 512"),
    by_method("ppo", "Llama-3-1B LoRA 16 and Qwen3-0.6B, ZeRO-0, checkpointing, 36 rows of 384 + 320",
              of_two("llama-3-1b", "qwen3-0.6b", 0, f"{CHECKPOINTED} --actor_lora_dim 16"), rows="36 12 3",
              lengths="384 320"),
    by_method("grpo", "Qwen3-1.7B, ZeRO-2, 8 samples of 6 prompts, 128 + 640",
              "--actor_model_name_or_path qwen3-1.7b --actor_zero_stage 2", rows="6 8 6", lengths="128 640"),
    by_method("grpo", "Mistral-7B LoRA 32, ZeRO-0, KL in the loss, 4 samples of 10 prompts, 256 + 384",
              "--actor_model_name_or_path mistral-7b --actor_zero_stage 0 --actor_lora_dim 32 --save_adapter_only true "
              "--num_samples_per_prompt 4 --kl_coef 0.01", rows="10 5 8", lengths="256 384"),
    by_method("rloo", "Pythia-1.4B, ZeRO-3, 4 samples of 14 prompts, 192 + 320",
              "--actor_model_name_or_path pythia-1.4b --actor_zero_stage 3", rows="14 7 8", lengths="192 320"),
    by_method("rloo", "OLMo-2-1B LoRA 64, ZeRO-1, checkpointing, 6 samples of 9 prompts, 320 + 448",
              "--actor_model_name_or_path olmo2-1b --actor_zero_stage 1 --actor_gradient_checkpointing true "
              "--actor_lora_dim 64 --num_samples_per_prompt 6", rows="9 18 3", lengths="320 448"),
    by_method("reinforce_pp", "Qwen3-0.6B with a reward model of Pythia-410M, ZeRO-1, 56 rows of 320 + 704",
              "--actor_model_name_or_path qwen3-0.6b --actor_zero_stage 1 --reward_model_name_or_path pythia-410m",
              rows="56 14 4", lengths="320 704"),
    by_method("reinforce_pp", "Llama-3-8B int8 LoRA 8, ZeRO-0, checkpointing, 24 rows of 448 + 192",
              "--actor_model_name_or_path llama-3-8b --actor_zero_stage 0 --actor_quantization int8 --actor_lora_dim 8 "
              "--save_adapter_only true --actor_gradient_checkpointing true", rows="24 6 4", lengths="448 192"),
)  # fmt: skip


def preferred(name: str, words: str, *, rows: str, lengths: str) -> PlannedRun:
    """A run of stage 3 by DPO, IPO or KTO, see `held_out`; its reference is gone before the policy is loaded."""
    return replace(held_out(name, "dpo", words, rows=rows, lengths=lengths), planner="without logits")


# Planned before any of them was run.
PREFERENCES = (
    preferred("DPO, Qwen2.5-0.5B, ZeRO-2, 12 pairs of 448", "--model_name_or_path qwen2.5-0.5b --zero_stage 2",
              rows="12 2", lengths="448"),
    preferred("DPO, Llama-3-1B LoRA 32, ZeRO-0, 5 pairs of 1,024",
              "--model_name_or_path llama-3-1b --zero_stage 0 --lora_dim 32", rows="5 3", lengths="1024"),
    preferred("IPO, Pythia-1.4B, ZeRO-3, checkpointing, 9 pairs of 640",
              "--method ipo --model_name_or_path pythia-1.4b --zero_stage 3 --gradient_checkpointing true", rows="9 1",
              lengths="640"),
    preferred("DPO, Mistral-7B int8 LoRA 16, ZeRO-0, checkpointing, 3 pairs of 768",
              "--model_name_or_path mistral-7b --zero_stage 0 --lora_dim 16 --quantization int8 "
              "--gradient_checkpointing true", rows="3 4", lengths="768"),
    preferred("KTO, OLMo-2-1B, ZeRO-1, 14 rows of 384", "--method kto --model_name_or_path olmo2-1b --zero_stage 1",
              rows="14 2", lengths="384"),
    preferred("KTO, Qwen2.5-1.5B LoRA 16, ZeRO-0, checkpointing, 22 rows of 896",
              "--method kto --model_name_or_path qwen2.5-1.5b --zero_stage 0 --lora_dim 16 "
              "--gradient_checkpointing true", rows="22 3", lengths="896"),
)  # fmt: skip
RUNS = (
    PlannedRun("SFT, OPT-350M, ZeRO-0", "sft", sft("350m", 0, 16)),
    PlannedRun("SFT, OPT-1.3B, ZeRO-2, checkpointing", "sft", sft("1.3b", 2, 16, "--gradient_checkpointing true")),
    PlannedRun("SFT, Llama-1B, ZeRO-1, LoRA 64", "sft", sft("llama-1b", 1, 8, "--lora_dim 64")),
    PlannedRun("SFT, Llama-1B, ZeRO-3", "sft", sft("llama-1b", 3, 8)),
    PlannedRun("SFT, OPT-1.3B, ZeRO-2, optimizer on the host", "sft", sft("1.3b", 2, 8, "--offload true")),
    PlannedRun("reward, OPT-350M, ZeRO-0", "reward", reward("350m", 0, 16)),
    PlannedRun("reward, OPT-125M, ZeRO-3", "reward", reward("125m", 3, 16)),
    PlannedRun("reward, Llama-1B, ZeRO-2, checkpointing", "reward",
               reward("llama-1b", 2, 8, "--gradient_checkpointing true")),
    PlannedRun("PPO, OPT-350M and 125M, ZeRO-0", "ppo", ppo("350m", "125m", 0, 16)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2", "ppo", ppo("1.3b", "350m", 2, 16)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-3", "ppo", ppo("1.3b", "350m", 3, 16)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2, LoRA 64", "ppo", ppo("1.3b", "350m", 2, 16, "--actor_lora_dim 64")),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2, checkpointing", "ppo", ppo("1.3b", "350m", 2, 16, CHECKPOINTED)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2, optimizers on the host", "ppo",
               ppo("1.3b", "350m", 2, 8, "--actor_offload_optimizer cpu --critic_offload_optimizer cpu")),
    PlannedRun("PPO, Llama-1B and OPT-350M, ZeRO-1", "ppo", ppo("llama-1b", "350m", 1, 8)),
    PlannedRun("PPO, Llama-7B LoRA 64 and Llama-1B, ZeRO-2", "ppo",
               ppo("llama-7b", "llama-1b", 2, 4, ADAPTERS), alone=True),
    PlannedRun("PPO, Llama-7B int8 LoRA 64 and OPT-350M, ZeRO-0", "ppo",
               ppo("llama-7b", "350m", 0, 4, f"{ADAPTERS} --actor_quantization int8"), alone=True),
    PlannedRun("SFT, Qwen2.5-0.5B, ZeRO-2", "sft", sft("qwen2.5-0.5b", 2, 8), held_out=True),
    PlannedRun("SFT, Qwen2.5-1.5B, ZeRO-0, LoRA 64", "sft", sft("qwen2.5-1.5b", 0, 8, "--lora_dim 64"), held_out=True),
    PlannedRun("reward, Qwen2.5-0.5B, ZeRO-1", "reward", reward("qwen2.5-0.5b", 1, 8), held_out=True),
    PlannedRun("PPO, Qwen2.5-1.5B and 0.5B, ZeRO-2", "ppo", ppo("qwen2.5-1.5b", "qwen2.5-0.5b", 2, 8), held_out=True),
    PlannedRun("PPO, Qwen2.5-1.5B and 0.5B, ZeRO-2, LoRA 64", "ppo",
               ppo("qwen2.5-1.5b", "qwen2.5-0.5b", 2, 8, "--actor_lora_dim 64"), held_out=True),
    PlannedRun("PPO, Llama-3-8B LoRA 64 and Llama-3-1B, ZeRO-2", "ppo",
               ppo("llama-3-8b", "llama-3-1b", 2, 4, ADAPTERS), held_out=True, alone=True),
    PlannedRun("SFT, OPT-1.3B, ZeRO-2", "sft", sft("1.3b", 2, 8), gpus=2, held_out=True),
    PlannedRun("SFT, Qwen2.5-1.5B, ZeRO-3", "sft", sft("qwen2.5-1.5b", 3, 8), gpus=2, held_out=True),
    PlannedRun("reward, Llama-1B, ZeRO-2", "reward", reward("llama-1b", 2, 8), gpus=2, held_out=True),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-1", "ppo", ppo("1.3b", "350m", 1, 16), gpus=2, held_out=True),
    PlannedRun("PPO, Qwen2.5-1.5B and 0.5B, ZeRO-3", "ppo", ppo("qwen2.5-1.5b", "qwen2.5-0.5b", 3, 8), gpus=2,
               held_out=True),
    PlannedRun("PPO, OPT-13B and 350M, ZeRO-3, checkpointing, optimizers on the host", "ppo",
               ppo("13b", "350m", 3, 8, f"{CHECKPOINTED} --actor_offload_optimizer cpu --critic_offload_optimizer cpu"),
               gpus=2, held_out=True, alone=True),
    PlannedRun("PPO, OPT-30B LoRA 64 and 350M, ZeRO-3, checkpointing, micro-batch 4", "ppo",
               ppo("30b", "350m", 3, 4, f"{ADAPTERS} {CHECKPOINTED}"), gpus=2, held_out=True, alone=True),
    PlannedRun("SFT, Qwen2.5-1.5B, ZeRO-1", "sft", sft("qwen2.5-1.5b", 1, 8), gpus=4, held_out=True, alone=True),
    PlannedRun("PPO, Llama-3-1B and Qwen2.5-0.5B, ZeRO-2", "ppo", ppo("llama-3-1b", "qwen2.5-0.5b", 2, 8), gpus=4,
               held_out=True, alone=True),
    PlannedRun("PPO, OPT-13B and 350M, ZeRO-3, checkpointing", "ppo", ppo("13b", "350m", 3, 8, CHECKPOINTED), gpus=4,
               held_out=True, alone=True),
    PlannedRun("PPO, OPT-30B LoRA 64 and 350M, ZeRO-3, checkpointing", "ppo",
               ppo("30b", "350m", 3, 8, f"{ADAPTERS} {CHECKPOINTED}"), gpus=4, held_out=True, alone=True),
    *NEXT,
    *METHODS,
    *PREFERENCES,
)  # fmt: skip


def stored(run: PlannedRun, *, alone: bool = False) -> PlannedRun:
    """A run whose backward passes store the logits of all pieces, unless it checkpoints its activations."""
    return replace(run, planner="without sharing", alone=alone)


def all_weights(model: str, zero_stage: int, rest: str = "") -> str:
    return f"--model_name_or_path {model} --zero_stage {zero_stage} {rest}"


# Planned before any of them was run, in lengths, batches and groups that no run before had.
STORED = (
    stored(held_out("SFT, Qwen2.5-1.5B, ZeRO-0, 9 rows of 704", "sft", all_weights("qwen2.5-1.5b", 0), rows="9 2",
                    lengths="704"), alone=True),
    stored(held_out("SFT, Qwen3-0.6B, ZeRO-2, 22 rows of 576", "sft", all_weights("qwen3-0.6b", 2), rows="22 1",
                    lengths="576")),
    stored(held_out("SFT, Llama-3-1B, ZeRO-3, 7 rows of 1,216", "sft", all_weights("llama-3-1b", 3), rows="7 3",
                    lengths="1216")),
    stored(held_out("SFT, Llama-3-8B LoRA 48, ZeRO-0, 3 rows of 1,472", "sft",
                    all_weights("llama-3-8b", 0, "--lora_dim 48 --save_adapter_only true"), rows="3 4",
                    lengths="1472"), alone=True),
    stored(held_out("SFT, OLMo-2-1B, ZeRO-1, checkpointing, 11 rows of 832", "sft",
                    all_weights("olmo2-1b", 1, "--gradient_checkpointing true"), rows="11 2", lengths="832")),
    stored(held_out("DPO, Qwen2.5-1.5B, ZeRO-2, 7 pairs of 544", "dpo", all_weights("qwen2.5-1.5b", 2), rows="7 4",
                    lengths="544"), alone=True),
    stored(held_out("DPO, Llama-3-1B, ZeRO-0, 6 pairs of 736", "dpo", all_weights("llama-3-1b", 0), rows="6 3",
                    lengths="736")),
    stored(held_out("IPO, Qwen3-1.7B LoRA 24, ZeRO-2, 5 pairs of 864", "dpo",
                    all_weights("qwen3-1.7b", 2, "--method ipo --lora_dim 24"), rows="5 2", lengths="864")),
    stored(held_out("KTO, Qwen2.5-0.5B, ZeRO-1, 26 rows of 416", "dpo",
                    all_weights("qwen2.5-0.5b", 1, "--method kto"), rows="26 2", lengths="416")),
    stored(by_method("grpo", "Qwen2.5-1.5B, ZeRO-2, 4 samples of 11 prompts, 96 + 672",
                     "--actor_model_name_or_path qwen2.5-1.5b --actor_zero_stage 2 --num_samples_per_prompt 4",
                     rows="11 11 4", lengths="96 672"), alone=True),
    stored(by_method("grpo", "Llama-3-1B LoRA 40, ZeRO-0, 5 samples of 8 prompts, 160 + 800",
                     "--actor_model_name_or_path llama-3-1b --actor_zero_stage 0 --actor_lora_dim 40 "
                     "--num_samples_per_prompt 5", rows="8 8 5", lengths="160 800")),
    stored(by_method("rloo", "Qwen3-0.6B, ZeRO-3, 3 samples of 20 prompts, 224 + 416",
                     "--actor_model_name_or_path qwen3-0.6b --actor_zero_stage 3 --num_samples_per_prompt 3",
                     rows="20 15 4", lengths="224 416")),
    stored(by_method("ppo", "Llama-3-1B, its critic made of it, ZeRO-2, 44 rows of 352 + 224",
                     "--actor_model_name_or_path llama-3-1b --actor_zero_stage 2 --critic_zero_stage 2",
                     rows="44 11 4", lengths="352 224")),
    stored(by_method("ppo", "Qwen2.5-0.5B LoRA 96 and Pythia-410M, ZeRO-1, 52 rows of 288 + 608",
                     of_two("qwen2.5-0.5b", "pythia-410m", 1, "--actor_lora_dim 96"), rows="52 13 4",
                     lengths="288 608")),
    stored(by_method("reinforce_pp", "OLMo-2-1B, ZeRO-1, 38 rows of 480 + 288",
                     "--actor_model_name_or_path olmo2-1b --actor_zero_stage 1", rows="38 19 2", lengths="480 288")),
    stored(by_method("rloo", "Mistral-7B LoRA 12, ZeRO-0, checkpointing, 2 samples of 17 prompts, 416 + 352",
                     "--actor_model_name_or_path mistral-7b --actor_zero_stage 0 --actor_lora_dim 12 "
                     "--actor_gradient_checkpointing true --save_adapter_only true --num_samples_per_prompt 2",
                     rows="17 17 2", lengths="416 352")),
)  # fmt: skip


def shared(method: str, name: str, model: str, words: str, *, rows: str, lengths: str) -> PlannedRun:
    """A run alone on its GPU, whose groups pass their prompts through the model once."""
    words = f"--actor_model_name_or_path {model} {words}"
    return replace(by_method(method, name, words, rows=rows, lengths=lengths), planner="now", alone=True)


# Planned before any of them was run: families, groups, lengths and batches that no run before had together.
SHARED = (
    shared("grpo", "Qwen3-0.6B, ZeRO-0, 8 samples of 12 prompts, 736 + 224", "qwen3-0.6b", "--actor_zero_stage 0",
           rows="12 16 6", lengths="736 224"),
    shared("grpo", "Llama-3-1B, ZeRO-2, 6 samples of 10 prompts, 544 + 480", "llama-3-1b",
           "--actor_zero_stage 2 --num_samples_per_prompt 6", rows="10 12 5", lengths="544 480"),
    shared("grpo", "OLMo-2-1B, ZeRO-1, checkpointing, 4 samples of 18 prompts, 864 + 160", "olmo2-1b",
           "--actor_zero_stage 1 --actor_gradient_checkpointing true --num_samples_per_prompt 4", rows="18 24 3",
           lengths="864 160"),
    shared("grpo", "Mistral-7B LoRA 24, ZeRO-0, 8 samples of 5 prompts, 608 + 352", "mistral-7b",
           "--actor_zero_stage 0 --actor_lora_dim 24 --save_adapter_only true", rows="5 8 5", lengths="608 352"),
    shared("rloo", "Pythia-410M, ZeRO-2, 7 samples of 16 prompts, 432 + 592", "pythia-410m",
           "--actor_zero_stage 2 --num_samples_per_prompt 7", rows="16 14 8", lengths="432 592"),
    shared("rloo", "Qwen2.5-1.5B LoRA 20, ZeRO-0, 3 samples of 26 prompts, 672 + 96", "qwen2.5-1.5b",
           "--actor_zero_stage 0 --actor_lora_dim 20 --num_samples_per_prompt 3", rows="26 13 6", lengths="672 96"),
)  # fmt: skip
LISTS = {"memory": RUNS, "stored": STORED, "shared": SHARED}
