"""The start of a run of a stage that trains one model, before it batches rows and loads weights."""

from transformers import PreTrainedTokenizerBase

from pipeline.configuration.stage import SupervisedConfig
from pipeline.data.cache import StageData
from pipeline.engine.build import start_engines
from pipeline.engine.start_models import check_start_models
from pipeline.models.source import ModelSource, prepare_tokenizer
from pipeline.preparation.inputs import prepare_stage
from pipeline.preparation.room import make_room
from pipeline.run.run import Run


def start_supervised(run: Run, config: SupervisedConfig) -> tuple[ModelSource, PreTrainedTokenizerBase, StageData]:
    """Start DeepSpeed, check the start model, make room on disks; return that model, its tokenizer and the rows.

    A collective. Raises:
        InputError: see `start_engines`, `check_start_models`, `prepare_stage`.
        EnvironmentFault: see `start_engines`, `make_room`.
    """
    start_engines(run)
    (source,) = check_start_models(run.stage.start_models(config, {}))
    make_room(run)
    tokenizer = prepare_tokenizer(source, config.data.template, config.data.chat_template_kwargs)
    (rows,) = prepare_stage(run, config, tokenizer, seq2seq=source.is_encoder_decoder)
    return source, tokenizer, rows
