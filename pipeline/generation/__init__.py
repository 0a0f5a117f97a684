"""Sampling responses from a policy: sessions of requests, backends, continuous batching, the weights they read.

session.py is the public interface: sources of sessions, requests with their own settings, responses, `generate`.
backends.py chooses the fastest backend that supports model and device, and logs why a faster one was not possible. All
backends compute the model's function, sample with the same random numbers, and return the same responses:
- fused: the project's decode step in a CUDA graph, for the decoders of `models/decoders/`;
- static: the forward pass of transformers on a static KV cache, in a CUDA graph;
- eager: the forward pass of transformers as it is.

Slots (slots.py, scheduler.py). Fused and static store the state and the settings of each response in device memory, and
give a free slot to the next response (continuous batching). The number of slots depends on memory; no random number
depends on it. A prefill overlaps decode steps on a side stream, and its responses start one scheduler iteration later.
It does not overlap in two cases:
- ranks meet in collectives within a forward pass, which need one order;
- the backend is static, whose decode step writes a key to free slots too.

Weights (sources.py). Tensors that a CUDA graph reads keep their address: they are views of the trained weights if
possible, else copies that each `generation()` refreshes in place, under ZeRO-3 a layer at a time. If whole weights do
not fit next to a few slots, they are streamed (forwards/streaming.py, `--rollout-weights`). Each rank then stores a
slice of every decoder layer and gathers groups of layers as a forward pass uses them. Streaming ranks run in lockstep:
in each scheduler iteration they agree on the number of prefills and decode steps.
"""
