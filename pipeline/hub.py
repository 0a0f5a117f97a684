"""Offline mode of the Hugging Face hub's client: without a network it would retry each file for half a minute."""

import functools
import os
import socket
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


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


def go_offline_without_network() -> None:
    """Switch the hub's client to offline mode where the hub cannot be reached: it reads its cache or fails at once."""
    import datasets
    from huggingface_hub import constants

    if not is_reachable():
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
