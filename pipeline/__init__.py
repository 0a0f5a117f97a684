"""The shared layer of the stages, without their training loops: leaf modules in this folder, and packages over them.

The packages below are in the order of imports: each imports only packages before it. Packages that a comma separates do
not import each other: configuration, kernels, data; models, run; launching, engine, generation, rewards, reporting;
checkpoints, planning, inference; training, preparation.
"""
