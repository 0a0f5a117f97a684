"""The demo: data with a known rule, a tiny model, and a report that measures the three stages against the rule."""
