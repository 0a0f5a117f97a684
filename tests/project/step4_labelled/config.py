"""The flags of stage 4."""

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, ModelConfig, OptimizerConfig
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import SupervisedConfig
from step4_labelled.rows import ROW_KINDS


class LabelledDataConfig(DataConfig):
    """Data"""

    max_seq_len: int = flag(512, "Tokens of a training row; longer rows are cut on the right", ge=8)


class LabelledConfig(SupervisedConfig):
    """Stage 4: a language model learns from answers with a label."""

    rows, shares = ROW_KINDS["labelled"].name, (1, 2)
    model: ModelConfig = ModelConfig(learning_rate=1e-5)
    data: LabelledDataConfig = LabelledDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output/labelled")
    unlikelihood: float = flag(1.0, "Weight of the bad answers", ge=0)
