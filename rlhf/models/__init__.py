"""Programs that write model folders without training: convert, export, merge."""
