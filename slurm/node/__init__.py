"""Run inside a job, on its first node: before, beside and after training."""
