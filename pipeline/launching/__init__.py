"""Launching of stages: the request, hosts and devices, and the ranks until they have ended. Imports no torch."""
