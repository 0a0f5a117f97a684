"""The parts that the training loops share: inputs, one optimizer step, metrics, and the course of a run."""
