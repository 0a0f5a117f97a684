"""Fast generation: prompts in slots, one decode step in a CUDA graph, kernels that read lengths from the device."""
