"""The parts that the training loops share: inputs, one optimizer step, metrics, and the control of a run."""
