"""Refuses answers that no project can be made of, in one line, before anything is copied."""

import json
import re
import sys

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
TASKS = ("language", "vision")
# A project of this name would stand in for the package in its own environment.
TAKEN = (
    *("torch", "lightning", "jsonargparse", "torchmetrics", "tensorboard", "numpy", "tqdm", "pyyaml", "submitit"),
    *("scikit-learn", "pytest", "ruff", "mypy", "types-pyyaml", "types-tqdm", "setuptools", "pip", "wheel"),
)


def complaint(answers: dict[str, str]) -> str | None:
    """What is wrong with the answers: what was got, what is allowed."""
    slug = answers["project_slug"]
    for key in ("project_name", "description", "author"):
        if not answers[key].isprintable() or len(answers[key]) > 500:
            return f"{key} {answers[key][:60]!r}: one line of at most 500 printable characters"
    if not answers["project_name"].strip():
        return "project_name is empty: what is the project called?"
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", slug):
        return (
            f"project_slug {slug[:60]!r} is no folder and distribution name: up to 100 of A-Z a-z 0-9 . _ -, "
            f"beginning and ending with a letter or digit"
        )
    if re.sub(r"[-_.]+", "-", slug).lower() in TAKEN:
        return f"project_slug {slug!r} is the name of a package that the project installs: choose another"
    if answers["task"] not in TASKS:
        return f"task {answers['task']!r} does not exist: {', '.join(TASKS)}"
    if not re.fullmatch(r"[\w.+-]*( *: *[\w.+,-]*)?", answers["account_partition"].strip(" ")):
        return f"account_partition {answers['account_partition'][:60]!r}: ACCOUNT:PARTITION, either may be empty"
    return None


if message := complaint(ANSWERS):
    sys.exit(f"error: {message}")
