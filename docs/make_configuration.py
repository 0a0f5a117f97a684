"""Write docs/configuration.md from the configuration models: `make reference`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.configuration.help import reference  # noqa: E402
from rlhf.chat import ChatConfig  # noqa: E402
from rlhf.compare import CompareConfig  # noqa: E402
from rlhf.models.convert import ConvertConfig  # noqa: E402
from rlhf.models.export import ExportConfig  # noqa: E402
from rlhf.models.merge import MergeConfig  # noqa: E402
from rlhf.report import ReportConfig  # noqa: E402
from rlhf.rewards.reward import RewardTrialConfig  # noqa: E402
from rlhf.rewards.sample import SampleConfig  # noqa: E402
from rlhf.train_config import TrainConfig  # noqa: E402
from step1_sft.config import SFTConfig  # noqa: E402
from step2_reward.config import RewardConfig, RewardEvalConfig  # noqa: E402
from step3_dpo.config import DPOConfig  # noqa: E402
from step3_ppo.config import PPOConfig  # noqa: E402

INTRODUCTION = """# Configuration

Made from the models in `pipeline/configuration/groups.py`, `stepN/config.py` and
`rlhf/train_config.py` and those of the other commands (`rlhf/chat.py`, `rlhf/models/convert.py`, ...) by
`make reference`; edit those, not this file.

A value's authority rises in this order: built-in default, DeepSpeed JSON (`--deepspeed_config`), preset (`--preset`),
YAML file (`--config`), command line. `config.json` in the run's folder holds every value and where it came from;
`python train.py --explain` prints the same and starts nothing. Both `-` and `_` work in flag names. A value that starts
with `--` is written `--flag=--value`. `true|false` flags need no value to be true. `...` means one or more values.

A YAML file holds `flag: value` lines for one stage, or sections:

```yaml
train: {actor_model: 1.3b, deployment_type: single_node}
sft: {learning_rate: 2e-5}
ppo: {kl_coef: 0.05, data_path: [my.jsonl:0.7, Dahoas/rm-static:0.3]}
```

## The user's DeepSpeed JSON

- Its values become flags where there is one (`zero_optimization.stage` is `--zero_stage`), with the file as their
  origin. A value that contradicts a flag given in a preset, a YAML file or on the command line is refused, naming both.
- `"auto"` is filled in from the flags; where there is no flag, DeepSpeed's own default holds. With `bf16` switched off
  and no `--dtype`, training is in fp32.
- All other values are passed on as they are and win over what we would write. Keys that begin with `_`, `/`, `#` or
  `$`, and `comment`, are remarks.
- Keys of another ZeRO stage than that of the models have no effect and are left out, so a file may hold those of
  several stages, as DeepSpeed-Chat's own does. Offloading what a stage does not partition is refused all the same.
- A key that DeepSpeed would silently ignore, or reads in another block, is refused with the right one; so are values of
  another kind (`"true"` for `true`), values that exclude each other, and what DeepSpeed has removed.
- What changes the numbers of a step or has a counterpart here is refused, with the reason: quantised weights and
  gradients of ZeRO++, ZenFlow, `torch_autocast`, `hybrid_engine`, `data_efficiency`, tensor and pipeline parallelism.
  Switched off, such a key is left out. `zero_hpz_partition_size` of ZeRO++ keeps the numbers and is passed on.
- The log and the dry run tell which flags the file sets, what else it gives to DeepSpeed, and what has no effect.
- `optimizer` and `scheduler` blocks are refused unless they are empty or all their parameters are `"auto"`: both are
  ours, and `--lr_scheduler_type` names the schedule.
- `train_batch_size`, if given, must be micro-batch x accumulation x ranks.
"""
PARTS = (
    ("`train.py`", TrainConfig),
    ("Stage 1, section `sft`", SFTConfig),
    ("Stage 2, section `reward`", RewardConfig),
    ("Stage 3, section `ppo`", PPOConfig),
    ("Stage 3 by DPO, IPO or KTO, section `dpo`", DPOConfig),
    ("`python -m step2_reward.eval`", RewardEvalConfig),
    ("`chat.py`", ChatConfig),
    ("`prompt_eval.py`", CompareConfig),
    ("`rlhf sample`", SampleConfig),
    ("`rlhf reward`", RewardTrialConfig),
    ("`rlhf report`", ReportConfig),
    ("`rlhf convert`", ConvertConfig),
    ("`rlhf export`", ExportConfig),
    ("`rlhf merge`", MergeConfig),
)


def whole_reference() -> str:
    """Return the text of docs/configuration.md."""
    return "\n".join([INTRODUCTION, *(f"## {title}\n\n{reference(config_class)}" for title, config_class in PARTS)])


if __name__ == "__main__":
    (ROOT / "docs" / "configuration.md").write_text(whole_reference(), encoding="utf-8")
