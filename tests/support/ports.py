"""Ports for ranks that a test starts."""

import random
import socket

# Below those that Linux gives to outgoing connections, as train.py's own: nothing else takes one before it is used.
PORTS = range(20000, 30000)


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    chosen = random.SystemRandom()  # tests seed the common generator, in several processes alike
    while True:
        port = chosen.choice(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
