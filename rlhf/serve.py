"""Serve finished models to a browser and to OpenAI's clients: `rlhf serve output/sft output/actor output/reward`."""

import logging
import os
import secrets
import socket
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Dtype, Group
from pipeline.errors import EnvironmentFault, InputError, show
from pipeline.models.paths import check_model_path, check_reward_model, gives_scores, last_part, read_config
from pipeline.run.entry import command, command_flags

if TYPE_CHECKING:
    import torch

    from pipeline.inference.answers import ChatModel
    from pipeline.inference.serving.app import Server

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_LENGTH = 4096


class ServeConfig(Group):
    """Serve models: `rlhf serve output/sft output/actor output/reward`."""

    model: list[str] = flag(
        [],
        "Folders or hub ids of language and reward models; the first is the baseline of votes",
        kind="path",
        positional=True,
        required=True,
    )
    host: str = flag("127.0.0.1", "Address to listen on; others than this machine's are reached without TLS")
    port: int = flag(8000, "Port to listen on; 0: a free one", ge=0, lt=2**16)
    max_requests: int = flag(16, "Answers that each model samples at a time; others wait", ge=1, le=1024)
    max_waiting: int = flag(64, "Answers that wait for all models; beyond them a request is refused (429)", ge=0)
    max_length: int = flag(
        0, "Tokens of the longest prompt with its answer; 0: the model's positions, at most 4096", ge=0,
        other_tools="max_model_len",
    )  # fmt: skip
    votes: str = flag("votes.jsonl", "File to which the page's votes are added, as preference pairs", kind="path")
    dtype: Dtype = flag("auto", "Data type of the weights; auto: bf16 if the device supports it, else fp32")


def run(argv: list[str], prog: str) -> None:
    """Check the command line, load the models, and serve until Ctrl-C."""
    config = command_flags(ServeConfig, argv, section="serve", prog=prog).config
    if not config.model:
        raise InputError(f"--model: missing; name a model's folder, for example: {prog} output/actor")
    names = model_names(config.model)
    for path in config.model:
        is_scorer = gives_scores(read_config(Path(path).expanduser()).get("architectures") or ())
        (check_reward_model if is_scorer else check_model_path)(path, "--model")
    listener = listening(config.host, config.port)
    try:
        import uvicorn

        from pipeline.inference.serving.guard import TimedProtocol
    except ModuleNotFoundError as error:
        raise EnvironmentFault(f"{error.name} is not installed; pip install 'rlhf-pipeline[serve]'") from None
    server = loaded(config, names)
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    names_of_host = ("127.0.0.1", "localhost", "[::1]") if config.host in LOOPBACK else ()
    hosts = {f"{name}{end}" for name in names_of_host for end in (f":{port}", *([""] if port == 80 else []))}
    application = server.app(hosts=hosts, token=token)
    settings = uvicorn.Config(
        application, http=TimedProtocol, ws="none", log_level="warning", access_log=False, server_header=False,
        h11_max_incomplete_event_size=2**16, timeout_graceful_shutdown=2, limit_concurrency=1000,
    )  # fmt: skip
    server.worker.open_sessions()
    address = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
    show(f"{address}/#token={token}  chat and compare in a browser")
    show(f"{address}/v1  for OpenAI's clients, with that token as API key")
    show("Ctrl-C ends it.")
    # Answers that Ctrl-C cancels are no errors of the application.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "CancelledError" not in str(record.exc_info))
    try:
        uvicorn.Server(settings).run(sockets=[listener])
    finally:
        server.worker.end()


def model_names(paths: list[str]) -> list[str]:
    """Return the name of each model in requests: the last part of its path, or the path where two are alike."""
    short = [last_part(path) for path in paths]
    names = [path if short.count(name) > 1 else name for name, path in zip(short, paths, strict=True)]
    if len(set(names)) < len(names):
        raise InputError(f"--model: {next(name for name in names if names.count(name) > 1)} is named twice")
    return names


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before any weight is read. Raises InputError."""
    if not host:
        raise InputError("--host: is empty; 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # Connections inherit the option. asyncio sets it where a socket's protocol is named, which this one's is not.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except socket.gaierror as error:
        raise InputError(f"--host: {host!r} is no address of this machine: {error.strerror}") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InputError(f"--port: cannot listen on {host}, port {port}: {reason}; 0 takes a free one") from None


def loaded(config: ServeConfig, names: list[str]) -> "Server":
    """Load all models. Raises InputError for one that sessions cannot serve."""
    from pipeline.generation.session import Capacity
    from pipeline.inference.answer_scores import load_scorer
    from pipeline.inference.answer_settings import ReplySettings
    from pipeline.inference.answers import only_transformers, resolve_dtype
    from pipeline.inference.serving.app import Server
    from pipeline.inference.serving.votes import Votes
    from pipeline.inference.serving.worker import ServedModel, Worker
    from pipeline.models.source import ModelSource

    dtype, models, scorers = resolve_dtype(config.dtype), [], {}
    votes = Votes(Path(config.votes).expanduser())
    judges = {path for path in config.model if gives_scores(ModelSource(path).config.architectures or ())}
    chat_models = load_chat_models([path for path in config.model if path not in judges], dtype)
    for name, path in zip(names, config.model, strict=True):
        if path in judges:
            scorers[name] = load_scorer(path, dtype=dtype)
            continue
        chat_model = chat_models[path]
        if only_transformers(chat_model, ReplySettings()):
            raise InputError(f"--model: {path} has no cache of keys and values; it cannot be served")
        positions = chat_model.num_positions
        longest = config.max_length or min(positions or DEFAULT_LENGTH, DEFAULT_LENGTH)
        if positions is not None and longest > positions:
            raise InputError(f"--max-length: got {longest}, {path} has {positions} positions")
        models.append(ServedModel(name, chat_model, Capacity(config.max_requests, longest - 1, longest)))
    max_answers = config.max_requests * len(models) + config.max_waiting
    return Server(Worker(models), scorers, votes, max_answers)


def load_chat_models(paths: list[str], dtype: "torch.dtype") -> "dict[str, ChatModel]":
    """Load language models, path -> model; a base and adapters on it have its weights in memory once.

    Such adapters are not merged: each takes little memory, and on a GPU more time than a merged model.

    Raises:
        InputError: a model cannot be loaded, or weights that several have do not fit on one device.
    """
    from pipeline.inference.answers import load_chat_model
    from pipeline.models.loaded import on_devices
    from pipeline.models.loading import load_language_model
    from pipeline.models.source import ModelSource

    by_base = defaultdict[str, list[str]](list)
    for path in paths:
        whole = ModelSource(path).whole.path
        by_base[os.path.realpath(whole) if Path(whole).is_dir() else whole].append(path)
    models: dict[str, ChatModel] = {}
    for whole, same in by_base.items():
        base = on_devices(load_language_model(ModelSource(whole), dtype=dtype), whole) if len(same) > 1 else None
        if base and len({parameter.device for parameter in base.parameters()}) > 1:
            raise InputError(f"--model: {whole} does not fit on one device; serve one model of it at a time")
        models |= {path: load_chat_model(path, dtype=dtype, base=base) for path in same}
    return models


main = command(run, "rlhf serve")
