"""Launching on Slurm. Never imports torch or lightning: a login node answers at once."""
