"""Decoders whose layers are attention and an MLP, in one form, and the families of models that have it."""
