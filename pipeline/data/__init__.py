"""From files and hub ids to tensors: sources, formats, splits, templates, samples, batches."""
