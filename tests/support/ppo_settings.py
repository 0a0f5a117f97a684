"""The configuration of a tiny PPO run, and a run without a folder of its own."""

from types import SimpleNamespace

from support.ppo_updates import TEMPERATURE

from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig
from pipeline.configuration.resolved import Resolved
from step3_ppo.config import PPOConfig
from step3_ppo.flags.groups import PPOCoefficients, PromptDataConfig, SamplingConfig
from step3_ppo.flags.teacher import TeacherConfig
from step3_ppo.stage import STAGE


def ppo_config(
    folders, *, actor_rate=1e-3, critic_rate=1e-3, actor=None, accumulation=1, teacher="", **ppo
) -> PPOConfig:
    return PPOConfig(
        actor=ModelConfig(model_name_or_path=folders.actor, learning_rate=actor_rate, **(actor or {})),
        critic=ModelConfig(model_name_or_path=folders.reward, learning_rate=critic_rate),
        data=PromptDataConfig(max_prompt_seq_len=16),
        sampling=SamplingConfig(
            per_device_generation_batch_size=4, generation_batches=1, max_answer_seq_len=8, temperature=TEMPERATURE
        ),
        ppo=PPOCoefficients(**ppo),
        teacher=TeacherConfig(teacher_model_name_or_path=teacher),
        optimizer=PPOConfig().optimizer.replace(
            per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, max_bad_steps=2,
            per_device_eval_batch_size=2,
        ),
        deepspeed=DeepSpeedConfig(dtype="fp32"),
    )  # fmt: skip


def make_run(world, folder, config: PPOConfig) -> SimpleNamespace:
    stop = SimpleNamespace(is_set=lambda: False, is_set_on_any_rank=lambda world: False)
    return SimpleNamespace(
        world=world, folder=folder, stage=STAGE, resolved=Resolved(config, {}), stop=stop, engine_jsons={}, plan={}
    )
