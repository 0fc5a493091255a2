"""Did `make train` learn? Reads the newest run in the folder given and fails where it did not."""

import json
import sys
from pathlib import Path

runs = sorted(Path(sys.argv[1]).glob("language-*"), key=lambda path: path.stat().st_mtime)
summary = json.loads((runs[-1] / "summary.json").read_text())
print(json.dumps(summary, indent=2))
if summary["exit_reason"] != "finished" or summary["best"]["value"] > 2.6:
    sys.exit("the default task did not reach 2.6 bits per byte")
