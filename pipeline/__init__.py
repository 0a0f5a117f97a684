"""The shared layer of the stages, without their training loops: leaf modules in this folder, and packages over them.

Packages in the order of imports; each imports only those before it, and those that a comma parts do not import each
other: configuration, kernels, data; models, run; launching, engine; generation, rewards, checkpoints, reporting;
training; planning; preparation; inference.
"""
