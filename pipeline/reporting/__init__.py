"""Reports of runs, written from the files in their folders: records, curves and pages."""
