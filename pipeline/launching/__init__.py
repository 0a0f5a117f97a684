"""Launching of stages: the request, hosts and devices, and the ranks until they have ended. It imports no torch."""
