"""Sampling responses from a policy: sessions of requests, backends, continuous batching, the hybrid engine.

session.py is the public interface: sources of sessions, requests with their own settings, responses, `generate`.
backends.py chooses the fastest backend that supports model and device, and logs why it fell back from a faster one:
fused (our own decode step, for the decoders of `models/decoders/`, in a CUDA graph), static (the forward pass of
transformers on a static KV cache, in a CUDA graph) or eager (that forward pass as it is). All compute the model's
function, sample with the same random numbers, and return the same responses; the forward passes are in forwards/.

Slots (slots.py, scheduler.py). The first two keep the state and the settings of each response in device memory, and
give a free slot to the next one (continuous batching). Memory decides how many slots there are; no random number
depends on it. A prefill overlaps decode steps on a side stream, and its responses start one scheduler iteration later;
not where ranks meet in collectives within a forward pass, which need one order, nor in the static backend, whose decode
step writes a key to free slots too.

Weights (hybrid_engine.py). What a CUDA graph reads keeps its address: views of the trained weights where possible, else
copies that each `generation()` refreshes in place, under ZeRO-3 a layer at a time. Where whole weights do not fit next
to a few slots, they are streamed (forwards/streaming.py, `--rollout-weights`): each rank keeps a slice of every decoder
layer, and groups of layers are gathered as a forward pass uses them. Ranks then run in lockstep: in each scheduler
iteration they agree on how many prefills and decode steps all of them make.
"""
