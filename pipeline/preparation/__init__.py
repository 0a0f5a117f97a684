"""The work before a run: checks of its models, data and disks, its dry run, and the choice of its flags."""
