"""Checkpoints of a run: written by `save`, chosen by `choose`."""
