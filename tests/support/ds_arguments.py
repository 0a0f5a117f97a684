"""What the tests of the DeepSpeed JSON share."""

import pytest

from pipeline.configuration.ds_config import training_config
from pipeline.configuration.groups import DeepSpeedConfig
from pipeline.errors import InputError


def built(settings: DeepSpeedConfig | None = None, **changes):
    """training_config with everyday arguments, some of them changed."""
    arguments = {
        "zero_stage": 2, "dtype": "bf16", "micro_batch_size": 4, "gradient_accumulation_steps": 2, "world_size": 8,
        "max_grad_norm": 1.0, "run_dir": "output/runs/sft", "device": "cuda",
    }  # fmt: skip
    return training_config(settings or DeepSpeedConfig(), **(arguments | changes))


def refusal(call, *args, **kwargs) -> list[str]:
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    return str(caught.value).splitlines()
