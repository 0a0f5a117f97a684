"""Sampling responses from a policy: generation backends, KV cache buffers, continuous batching, the hybrid engine.

Every backend computes the model's function, samples with the same random numbers, and returns the same `Rollout`:
ragged rows with lengths, the sampler's log-probabilities and the reason why each ended. Nothing is promised about
padding.

- fused (fused.py, fused_weights.py, kernels/): our own decode step, for OPT and models of Llama's shape, in a CUDA
  graph.
- static (static.py): the forward pass of transformers on a static KV cache, in a CUDA graph.
- eager (eager.py): the forward pass of transformers as it is.

backends.py chooses the fastest that supports model and device, and logs why it fell back from a faster one.

Slots. The fused and the static backend keep responses in slots (slots.py): lengths, ends and random numbers are in
device memory, and a free slot is given to the next response (continuous batching, scheduler.py), so that the work
follows real lengths. Memory decides how many slots there are; in 16 bits that is part of the shape of a forward pass,
but no random number depends on it. In the fused backend, where ranks sample on their own, a prefill overlaps decode
steps on a side stream, and its responses start one scheduler iteration later. Not so where ranks meet in collectives
within a forward pass (tensor parallelism, streamed weights): these would need one order on all ranks. Nor in the
static backend, whose decode step writes a key to free slots too.

Weights. Only the hybrid engine (hybrid_engine.py) knows how generation reads the trained weights. What a CUDA graph
reads keeps its address: views of the trained weights where possible, else copies that each `generation()` refreshes in
place. Under ZeRO-3 the fused backend copies whole weights, a layer at a time. Where these do not fit in memory next to
a few slots, weights are streamed (streaming.py, `--rollout_weights`): each rank keeps its slice of every decoder
layer, and groups of layers are gathered into two buffers while a forward pass uses them. Ranks then run in lockstep:
in each scheduler iteration they agree on how many prefills and decode steps all of them make, and a rank without
prompts of its own takes part in the gathering.
"""
