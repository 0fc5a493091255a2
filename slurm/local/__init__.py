"""Set up a local Slurm of four nodes, for slurm/local_cluster.py."""
