"""The project's package: `python -m src.cli fit --config configs/cpu.yaml`."""
