"""Ids of hub repositories with their revisions, the commits that were read of them, and the client's offline mode."""

import functools
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONNECT_TIMEOUT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

# The commit that this process has read of each hub path of data or a model, for the documents of its outputs.
commits_read: dict[str, str] = {}


def split_revision(path: str) -> tuple[str, str | None]:
    """Split 'org/name@revision' into a hub id and the branch, tag or commit to read; None for a path that names none.

    An existing path of this machine has no revision, whatever its name.
    """
    name, _, revision = path.partition("@")
    if not revision or not HUB_ID.fullmatch(name) or Path(path).exists():
        return path, None
    return name, revision


@functools.cache
def is_reachable() -> bool:
    """Return True if the hub can be reached, by a proxy perhaps, and the client is not in offline mode."""
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
    """Keep the hub's client in offline mode in the body: it reads its cache or fails at once."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def go_offline_without_network() -> None:
    """Switch the hub's client to offline mode where the hub cannot be reached: it reads its cache or fails at once."""
    import datasets
    from huggingface_hub import constants

    if not is_reachable():
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
