"""Convert a model that DeepSpeed-Chat saved: `rlhf convert SOURCE OUTPUT`."""

from pathlib import Path

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Group
from pipeline.errors import InputError, say
from pipeline.files import check_replaceable, has_config
from pipeline.run.entry import command, command_flags
from pipeline.run.output_checks import clashes


class ConvertConfig(Group):
    """Convert a model of DeepSpeed-Chat: `rlhf convert ../dschat/actor output/actor`."""

    folders: list[str] = flag(
        [],
        "The folder that DeepSpeed-Chat wrote, and the one to write",
        kind="path",
        positional=True,
        required=True,
        other_tools="model source output output_dir",
    )
    tokenizer: str = flag(
        "", "Folder or hub id of the original model's tokenizer; none: the source's vocabulary files", kind="path"
    )
    overwrite: bool = flag(False, "Replace a model of this project in the output folder")


def run(argv: list[str], prog: str) -> None:
    """Check the command line, then read, convert and write."""
    config = command_flags(ConvertConfig, argv, section="convert", prog=prog).config
    if len(config.folders) != 2:
        raise InputError(f"--folders: got {len(config.folders)}, expected two: {prog} SOURCE OUTPUT")
    source, output = (Path(folder).expanduser() for folder in config.folders)
    check_folders(source, output, overwrite=config.overwrite)
    from pipeline.checkpoints.deepspeed_chat import convert

    say(f"written: {convert(source, output, tokenizer_path=config.tokenizer)}")


def check_folders(source: Path, output: Path, *, overwrite: bool) -> None:
    """Raise InputError if the source is no folder or the output may not be written."""
    if not source.is_dir():
        raise InputError(f"{source}: no such folder; download a hub model with `hf download` first")
    if lines := list(clashes([("OUTPUT", output)], [("SOURCE", source)])):
        raise InputError(lines[0])
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file, expected a new or empty folder")
    try:
        check_replaceable(output)
    except InputError as error:
        raise InputError(str(error).removeprefix("--output-dir: ")) from None
    if has_config(output) and not overwrite:
        raise InputError(f"{output} holds a model; name another folder, or give --overwrite to replace it")


main = command(run, "rlhf convert")
