"""Ports for ranks that a test starts."""

import random
import socket

from pipeline.launching.remote_ranks import PORTS


def free_port() -> int:
    """Return a port of the loopback interface that is free now, and that no outgoing connection takes."""
    chosen = random.SystemRandom()  # tests seed the common generator, in several processes alike
    while True:
        port = chosen.choice(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
