"""Answers of a model to the prompts of files, as JSON lines: `rlhf sample output/sft --data prompts.jsonl -n 8`."""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.flags import stage_arguments
from pipeline.configuration.groups import Dtype, Group
from pipeline.data.counts import Counts
from pipeline.data.sources import is_conversational
from pipeline.errors import InputError, counted
from pipeline.files import model_fingerprint
from pipeline.generation.options import MAX_SAMPLES
from pipeline.inference.answer_settings import DrawSettings
from pipeline.inference.sample_file import SampleFile, sample_file
from pipeline.inference.sample_rows import RowLayout, prompt_columns, row_of
from pipeline.models.paths import check_language_model
from pipeline.rendezvous import num_ranks
from pipeline.rewards.functions import parse_reward_functions
from pipeline.rewards.pool import Failure, RewardPool
from pipeline.run.entry import command_flags, run_command

if TYPE_CHECKING:
    from pipeline.inference.sampling import SamplePrompt

PROGRESS_S = 10.0


class SampleConfig(Group):
    """Sample answers of a model, for example with: output/sft --data prompts.jsonl -n 8 --output answers.jsonl"""

    model: str = flag("", "Folder (a merged model or a LoRA adapter) or hub id", kind="path", positional=True)
    data: list[str] = flag(
        [], "Files, folders or hub ids with prompts, read as for training", kind="path", aliases=("data_path",)
    )
    column_map: str = flag("", "Columns of other names: prompt=question,chosen=best")
    max_prompt_seq_len: int = flag(
        0, "Tokens of a prompt, longer ones are left out; 0: as many as --max_new_tokens leaves", ge=0
    )
    n: int = flag(1, "Answers to each prompt; also -n", ge=1, le=MAX_SAMPLES, aliases=("num_return_sequences",))
    output: str = flag(
        "", "File of JSON lines, which the same command goes on with; none: standard output", kind="path"
    )
    overwrite: bool = flag(False, "Begin --output anew")
    write_as: RowLayout = flag(
        "answers",
        "A row is all answers to a prompt; sft: the best one, for step 1; pairs: the best and the worst, for step 2",
        aliases=("as",),
    )
    reward_function: list[str] = flag(
        [],
        "Functions that score answers: FILE.py:NAME, or a NAME of the box, each with an optional :WEIGHT",
        aliases=("reward",),
    )
    reward_timeout_s: float = flag(30.0, "Seconds of one call of a reward function", gt=0)
    reward_workers: int = flag(2, "Processes that call reward functions", ge=1)
    batch_size: int = flag(16, "Prompts whose answers are sampled at once", ge=1)
    seed: int = flag(1234, "Makes answers repeatable, whatever is sampled beside them", ge=0)
    dtype: Dtype = flag("auto", "Data type of the weights; auto: bf16 where the device has it, else fp32")
    sampling: DrawSettings = DrawSettings(temperature=1.0)

    @model_validator(mode="after")
    def _answers_can_differ(self) -> Self:
        if self.n > 1 and self.sampling.temperature == 0:
            raise ValueError(f"--n: {self.n} greedy answers would be the same; give a --temperature above 0")
        if self.write_as == "pairs" and (self.n == 1 or not self.reward_function):
            raise ValueError("--write_as pairs: needs --n of at least 2 and a --reward_function")
        if self.write_as == "sft" and self.n > 1 and not self.reward_function:
            raise ValueError(f"--write_as sft: needs a --reward_function that tells the best of {self.n} answers")
        return self


def main(argv: list[str] | None = None, *, prog: str = "rlhf sample") -> int:
    """Run the command line; returns the exit code. `prog` is how a user calls this program, for its help."""
    return run_command(lambda: run(stage_arguments(argv), prog))


def run(argv: list[str], prog: str) -> None:
    """Check the command line, the prompts and the reward functions, then sample, score and write."""
    words = ["--n" if word == "-n" else word for word in argv]
    config = command_flags(SampleConfig, words, section="sample", prog=prog).config
    if not config.model or not config.data:
        raise InputError(
            f"--{'data' if config.model else 'model'}: missing; for example: {prog} output/sft --data FILE"
        )
    if num_ranks() > 1:
        raise InputError(f"found {num_ranks()} ranks; this program is one process: start it without torchrun")
    check_language_model(config.model, "--model")
    functions = parse_reward_functions([entry_of(text) for text in config.reward_function])
    from pipeline.inference.answers import load_chat_tokenizer, resolve_dtype
    from pipeline.inference.sampling import prompts_digest, read_sample_prompts
    from pipeline.models.source import ModelSource

    source, counts = ModelSource(config.model), Counts()
    tokenizer, limit = load_chat_tokenizer(source), prompt_limit(config, source)
    prompts = read_sample_prompts(config.data, tokenizer, counts, config.column_map, limit)
    for line in counts.lines():
        print(f"note: {line}", file=sys.stderr)
    settings = {
        "model": model_fingerprint(config.model),
        "prompts": prompts_digest(prompts),
        **{name: getattr(config, name) for name in ("n", "write_as", "seed")},
        **config.sampling.model_dump(),
        "dtype": str(resolve_dtype(config.dtype)).removeprefix("torch."),
        "reward_function": [[one.name, one.digest, one.weight, one.args] for one in functions],
    }
    pool = RewardPool(functions, num_workers=config.reward_workers, timeout_s=config.reward_timeout_s)
    with pool:
        pool.check({name for names in counts.passed.values() for name in names})
        with sample_file(config.output, settings, overwrite=config.overwrite) as output:
            if output.last:
                print(f"{config.output}: going on behind prompt {output.last} of {len(prompts)}", file=sys.stderr)
            if output.last < len(prompts):
                write_rows(config, prompts, pool, output)


def entry_of(text: str) -> Any:
    """Return an entry of --reward_function: what JSON has for a mapping of a YAML file, else the text."""
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text


def prompt_limit(config: SampleConfig, source: Any) -> int:
    """Return the most tokens that a prompt may have.

    Raises:
        InputError: the model cannot be sampled from, or has too few positions.
    """
    from pipeline.models.source import has_key_value_cache, num_positions

    if source.is_encoder_decoder or not has_key_value_cache(source.config):
        kind = source.config.model_type
        raise InputError(f"--model: {config.model} ({kind}) is no decoder with a cache of keys and values; name one")
    new, positions = config.sampling.max_new_tokens, num_positions(source.config)
    limit = config.max_prompt_seq_len or (sys.maxsize if positions is None else positions - new)
    if positions is not None and not 1 <= limit <= positions - new:
        found = f"{config.max_prompt_seq_len or 'some'} tokens of a prompt and --max_new_tokens {new}"
        raise InputError(f"--max_prompt_seq_len: {found} do not fit into the model's {positions} positions")
    return limit


def write_rows(config: SampleConfig, prompts: "Sequence[SamplePrompt]", pool: RewardPool, output: SampleFile) -> None:
    """Sample the answers that the file does not have yet, and write a row for each prompt that gives one."""
    from pipeline.generation.rollouts import Sampling
    from pipeline.inference.answers import load_chat_model, resolve_dtype
    from pipeline.inference.sampling import sample

    first, num_before, drawn = output.last, output.num_rows, config.sampling
    reasons, failed, causes = Counter[str](), Counter[str](), dict[str, Failure]()
    is_conversation = any(map(is_conversational, config.data))
    sampled = sample(
        load_chat_model(config.model, dtype=resolve_dtype(config.dtype)),
        prompts,
        pool,
        Sampling(drawn.max_new_tokens, drawn.temperature, drawn.top_p, drawn.top_k),
        first=first,
        num_samples=config.n,
        num_slots=config.n * config.batch_size,
        seed=config.seed,
        is_conversation=is_conversation,
    )
    told = time.monotonic()
    for prompt, answers, values in sampled:
        row = row_of(config.write_as, prompt_columns(prompt.messages, is_conversation=is_conversation), answers)
        if isinstance(row, str):
            reasons[row] += 1
        else:
            output.write(prompt.number, row)
        failures = [(name, one) for name, found in values.items() for one in found if isinstance(one, Failure)]
        failed.update(name for name, _ in failures)
        causes = dict(reversed(failures)) | causes
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(f"{prompt.number} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    num_new, num_prompts = output.num_rows - num_before, len(prompts) - first
    print(f"{counted(num_new, 'row')} of {counted(num_prompts, 'prompt')} written", file=sys.stderr)
    lines = [f"{counted(count, 'prompt')} without a row: {reason}" for reason, count in reasons.items()]
    for name, one in causes.items():
        lines.append(
            f"{name} gave no value for {counted(failed[name], 'answer')}, at first ({one.kind}): {one.message}"
        )
    print(*(f"note: {line}" for line in lines), sep="\n", end="\n" * bool(lines), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.rewards.sample"))
