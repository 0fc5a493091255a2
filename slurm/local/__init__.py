"""The local four-node Slurm: its settings, and what slurm/local_cluster.py does to the machine."""
