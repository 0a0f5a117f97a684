"""The parts that the training loops share: one optimizer step, metrics, and the control of a run."""
