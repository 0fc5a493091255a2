"""Refuses answers that no project can be made of, in one line, before anything is copied.

What depends on the files of the project (its tasks, clusters, packages) is refused by post_gen_project.py.
"""

from __future__ import annotations  # cookiecutter may run on an older Python than the project

import json
import re
import sys
import unicodedata

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
# Words that YAML or Slurm's files take for something else than a name.
NO_NAMES = ("true", "false", "yes", "no", "on", "off", "null", "~")


def complaint(answers: dict[str, str]) -> str | None:
    """Return what is wrong with the answers: what was got, what is allowed."""
    slug = answers["project_slug"]
    for key in ("project_name", "description", "author"):
        # Cc: control characters, Zl and Zp: line and paragraph separators, Cs: half a character
        if (
            any(unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs") for char in answers[key])
            or len(answers[key]) > 500
        ):
            return f"{key} {answers[key][:60]!r}: one line of at most 500 characters, without control characters"
    if not answers["project_name"].strip():
        return "project_name is empty: what is the project called?"
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", slug):
        return (
            f"project_slug {slug[:60]!r} is no folder and distribution name: up to 100 of A-Z a-z 0-9 . _ -, "
            f"beginning and ending with a letter or digit"
        )
    if not re.fullmatch(r"[\w.+-]*( *: *[\w.+,-]*)?", answers["account_partition"].strip(" ")):
        return f"account_partition {answers['account_partition'][:60]!r}: ACCOUNT:PARTITION, either may be empty"
    for part in answers["account_partition"].split(":"):
        if part.strip().lower() in NO_NAMES:
            return f"account_partition: {part.strip()!r} is no name of an account or partition"
    return None


if message := complaint(ANSWERS):
    sys.exit(f"error: {message}")
