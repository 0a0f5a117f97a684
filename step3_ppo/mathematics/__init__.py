"""The mathematics of stage 3: pure functions of tensors."""
