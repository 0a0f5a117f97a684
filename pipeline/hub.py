"""Repositories of the hub: ids with revisions, commits that were read, offline mode, uploads of models."""

import functools
import os
import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.errors import EnvironmentFault
from pipeline.heartbeat import result_of

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONNECT_TIMEOUT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

# Hub path of data or a model -> the commit that this process has read, for the documents of its outputs.
commits_read: dict[str, str] = {}


def split_revision(path: str) -> tuple[str, str | None]:
    """Split 'org/name@revision' into a hub id and the branch, tag or commit to read; None if the path names none.

    An existing path on this machine has no revision, whatever its name.
    """
    name, _, revision = path.partition("@")
    if not revision or not HUB_ID.fullmatch(name) or Path(path).exists():
        return path, None
    return name, revision


@functools.cache
def is_reachable() -> bool:
    """Return True if the hub can be reached, directly or by a proxy, and the client is not in offline mode."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in PROXIES):
        return not constants.HF_HUB_OFFLINE
    url = urlsplit(constants.ENDPOINT)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def offline() -> Iterator[None]:
    """Put the hub's client in offline mode inside the context: it reads its cache or fails at once."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def go_offline_without_network() -> None:
    """Put the hub's client in offline mode if the hub cannot be reached: it reads its cache or fails at once."""
    import datasets
    from huggingface_hub import constants

    if not is_reachable():
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def check_push(repository: str) -> None:
    """Raise EnvironmentFault if --push-to-hub could not upload to `repository`; an empty name requests no upload."""
    from huggingface_hub import constants, get_token

    if not repository:
        return
    reason = "" if get_token() else "there is no token of the hub: run `hf auth login`, or set HF_TOKEN"
    if not is_reachable():
        how = "its client is in offline mode (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
        reason = f"the hub cannot be reached: {how}"
    if reason:
        raise EnvironmentFault(f"--push-to-hub {repository}: {reason}; without the flag the model stays on the disk")


def push(folder: Path, repository: str) -> str:
    """Upload a model folder to `repository`, which is created as private if it is missing; return its address.

    Raises EnvironmentFault, with the command to upload by hand, for any error of the client or the hub.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        client = HfApi()
        repo = client.create_repo(repository, private=True, exist_ok=True)
        message = f"Upload {folder.name} by rlhf-pipeline"
        result_of(
            client.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=message, run_as_future=True)
        )
    except Exception as error:  # the client's, its HTTP library's, or the disk's
        reason = re.sub("[^ -~]+", " ", f"{type(error).__name__}: {error}")[:300]  # safe for a terminal
        by_hand = shlex.join(["hf", "upload", repository, str(folder), ".", "--private"])
        raise EnvironmentFault(
            f"--push-to-hub {repository}: not uploaded ({reason}); the model is whole in {folder}: {by_hand}"
        ) from error
    return str(repo)
