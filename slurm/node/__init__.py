"""What runs inside a job, on its first node: before training, beside it and behind it."""
