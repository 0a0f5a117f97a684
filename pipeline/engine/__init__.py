"""A model under DeepSpeed: gradients, ZeRO-3 gathering, memory, optimizer state."""
