"""The machinery: docs/engine.md has its rooms and the way through them. It imports nothing of what is yours."""
