"""Quality of a selection on any checkpoint: tasks, the runs that score them, and their report."""
