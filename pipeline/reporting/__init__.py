"""Reports of runs, made of the files in their folders alone: records, curves, pages, and their own process."""
