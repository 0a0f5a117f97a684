"""What comes before a run: looking at its models, data and disks, its dry run, and the flags chosen for it."""
