"""The work before a run: its rows, checks of models, data and disks, its dry run, and the choice of its flags."""
