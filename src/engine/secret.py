"""Recognize keys, tokens and passwords: `src.cli` and the launcher refuse options that hold one."""

import re
from collections.abc import Sequence

# A key, token or password in clear or in a URL; `export MY_TOKEN=$(cat ~/.my_token)` is fine.
SECRET = re.compile(r"""(\b|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD)=(?!["']?\$|["']?$)|://[^/\s:@]+:[^/\s@$]+@""", re.I)
# An option whose value may be a secret; a number (model.mask_token 5), a switch or nothing is none.
OPTION = re.compile(r"(api_?key|_key|token|secret|password|passwd|passphrase|credentials?)$", re.IGNORECASE)
HARMLESS = re.compile(r"[-+.\deE]*|true|false|null|none", re.IGNORECASE)
# The same inside of a dictionary, a user without password in a URL (https://ghp_…@github.com), a signed URL, a header,
# and what the keys of well-known services begin with. A short token may be a word of a vocabulary, as "<eos>".
INSIDE = re.compile(
    r"""(api_?key|secret|password|passwd|passphrase)["']?\s*:\s*[^\s}$]|token["']?\s*:\s*["']?[\w.-]{12}|://[^/\s@]+@"""
    r"""|[?&](sig|signature|\w*key|\w*token)=|AccountKey=|\bbearer\s+\S|\b(hf_|gh[pousr]_|github_pat_|sk-|AKIA)\w{8}""",
    re.IGNORECASE,
)


def secret_option(arguments: Sequence[str]) -> str | None:
    """Return the first of these options that seems to hold a secret, without its value; None where none does."""
    for index, part in enumerate(arguments):
        name, equals, value = part.partition("=")
        value = value if equals else arguments[index + 1] if index + 1 < len(arguments) else ""
        is_secret = name.startswith("--") and OPTION.search(name) and not HARMLESS.fullmatch(value)
        if is_secret or SECRET.search(value if name.startswith("--") and equals else part) or INSIDE.search(part):
            what = name if name.startswith("--") else arguments[index - 1] if index else "the first argument"
            return what.split("=")[0]
    return None
