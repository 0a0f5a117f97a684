"""Reports of runs, written from the files in their folders: records, curves, pages, and the report's process."""
