"""Set up a local Slurm of four nodes, for `python -m slurm.local`."""
