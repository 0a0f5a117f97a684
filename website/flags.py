"""The page of all flags: one table of those that the four stages share, then each command's own."""

import itertools
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from pipeline.configuration.flag_table import Flag, flag_table
from rlhf.chat import ChatConfig
from rlhf.compare import CompareConfig
from rlhf.models.convert import ConvertConfig
from rlhf.models.export import ExportConfig
from rlhf.models.merge import MergeConfig
from rlhf.report import ReportConfig
from rlhf.rewards.eval import EvalConfig
from rlhf.rewards.reward import RewardTrialConfig
from rlhf.rewards.sample import SampleConfig
from rlhf.serve import ServeConfig
from rlhf.train_config import TrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig, RewardEvalConfig
from step3_dpo.config import DPOConfig
from step3_ppo.config import PPOConfig
from website.tables import escaped, row

INTRODUCTION = """# Flags

Type words in the field above to filter the tables, or see one command's flags with `--help-all`. `rlhf train --help
kl-coef` explains one flag, `--help lora` a topic. In the shell a flag's words are joined by `-`; in YAML by `_`. Both
are read in both. `true|false` flags need no value to be true, and `...` means one or more values.
A value that itself starts with `--` is written `--flag=--value`.

The defaults below are those of PPO. Another method has its own, for example 8 samples a prompt and no KL penalty in
GRPO: [methods](../learn/methods.md).

## Which value wins

From the weakest to the strongest: the built-in default, the DeepSpeed JSON (`--deepspeed-config`), the preset
(`--preset`), the YAML file (`--config`), the command line. `config.json` in a run's folder holds every value and where
it came from. `rlhf train --explain` prints the same and starts nothing.

A YAML file holds `flag: value` lines for one stage, or a section for each stage:

```yaml
train: {actor_model: qwen2.5-0.5b, deployment_type: single_node}
sft: {learning_rate: 2e-5}
ppo: {kl_coef: 0.05, data_path: [my.jsonl:0.7, Dahoas/rm-static:0.3]}
```

## Your own DeepSpeed JSON

- Values that have a flag become that flag (`zero_optimization.stage` is `--zero-stage`). A value that contradicts a
  flag from a preset, a YAML file or the command line is an error that names both.
- `"auto"` is filled in from the flags. A key without a flag keeps DeepSpeed's default.
- Other values are passed to DeepSpeed unchanged. Keys that begin with `_`, `/`, `#` or `$`, and `comment`, are remarks.
- A key that DeepSpeed would ignore, that it has removed, or whose value has the wrong type is an error that names the
  right one.
- Features that change the numbers of a step are refused: quantised weights and gradients of ZeRO++, ZenFlow,
  `torch_autocast`, `hybrid_engine`, `data_efficiency`, tensor and pipeline parallelism.
- Blocks `optimizer` and `scheduler` must be empty or `"auto"`: `--lr-scheduler-type` and the learning rates are flags.
- `train_batch_size` must equal micro-batch x accumulation x ranks.
"""
STAGES: Mapping[str, type[BaseModel]] = {
    "Stage 1: SFT (section `sft`)": SFTConfig,
    "Stage 2: reward model (section `reward`)": RewardConfig,
    "Stage 3: PPO, GRPO, RLOO, REINFORCE++, distillation (section `ppo`)": PPOConfig,
    "Stage 3: DPO, IPO, KTO (section `dpo`)": DPOConfig,
}
COMMANDS: Mapping[str, type[BaseModel]] = {
    "`rlhf train`": TrainConfig,
    "`python -m step2_reward.eval`": RewardEvalConfig,
    "`rlhf chat`": ChatConfig,
    "`rlhf serve`": ServeConfig,
    "`rlhf compare`": CompareConfig,
    "`rlhf eval`": EvalConfig,
    "`rlhf sample`": SampleConfig,
    "`rlhf reward`": RewardTrialConfig,
    "`rlhf report`": ReportConfig,
    "`rlhf convert`": ConvertConfig,
    "`rlhf export`": ExportConfig,
    "`rlhf merge`": MergeConfig,
}


def tables(flags: Iterable[Flag]) -> str:
    """Return a table for each group of flags."""
    blocks = []
    for group, members in itertools.groupby(flags, key=lambda flag: flag.group):
        rows = ["| flag | type | default | meaning |", "|---|---|---|---|", *map(flag_row, members)]
        blocks.append(f"### {group}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(blocks)


def flag_row(flag: Flag) -> str:
    """Return the row of a flag, its name as it is typed in a shell: flag, type, default, meaning."""
    return row(f"`{flag.shown}`", f"`{flag.type_name}`", f"`{flag.shown_default}`", escaped(flag.meaning))


def shared_rows() -> dict[str, Flag]:
    """Return the flags whose row is the same in all four stages, by name."""
    first, *others = (flag_table(config) for config in STAGES.values())
    return {
        name: flag
        for name, flag in first.items()
        if all(name in table and flag_row(table[name]) == flag_row(flag) for table in others)
    }


def page() -> str:
    """Return the text of reference/flags.md."""
    shared = shared_rows()
    parts = [INTRODUCTION, f"## All four stages\n\n{tables(shared.values())}"]
    for title, config in STAGES.items():
        parts.append(
            f"## {title}\n\n" + tables(flag for name, flag in flag_table(config).items() if name not in shared)
        )
    parts += [f"## {title}\n\n{tables(flag_table(config).values())}" for title, config in COMMANDS.items()]
    return "\n".join(parts)
