"""The shared layer: leaves that the three stages use; no training loop lives here."""
