"""The shared layer of the three stages, without their training loops.

Packages in the order of imports, each importing only those before it: configuration, kernels, data (over the leaf
modules of this folder, and not over each other), models, run, launching, engine, generation, checkpoints, training,
inference.
"""
