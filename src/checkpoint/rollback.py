"""`rollback`: let the next start resume from an earlier step, without deleting anything."""

import os
from pathlib import Path

from src.checkpoint.entries import FOLDER, Entry, candidates, known_steps
from src.engine.checkpoint.files import fault
from src.engine.checkpoint.move import free_name
from src.engine.errors import UserError
from src.engine.files import read_json
from src.engine.run.lock import hold, owner, release

ASIDE = "rolled-back"


def roll_back(run: Path, before_step: int) -> None:
    """Move every checkpoint of `before_step` or more steps to a subfolder, and print where the next start resumes.

    Nothing is changed if the run is being trained or no whole checkpoint has fewer steps. The start itself cuts metrics
    and TensorBoard files back.
    """
    if (holder := owner(run)) is not None:
        raise UserError(f"run {run.name} is being trained right now by {holder}: stop it, then roll back")
    earlier = [entry for entry in candidates(run) if (entry.step or 0) < before_step and not entry.weights_only]
    target = next((entry for entry in earlier if fault(entry.path) is None), None)
    if target is None:
        damaged = f" ({len(earlier)} damaged)" if earlier else ""
        raise UserError(
            f"run {run.name} has no whole checkpoint before step {before_step}{damaged}, so nothing is changed; "
            f"{known_steps(run)}"
        )
    hold(run)  # nobody may start it while files move
    try:
        moved = _move([entry for entry in candidates(run) if (entry.step or 0) >= before_step], run)
    finally:
        release()
    print(f"moved {moved} checkpoints to {run / FOLDER / ASIDE}" if moved else "no checkpoint is that late")
    print(f"the next start of run {run.name} resumes from step {target.step}, {target.path.name}")
    if target.kind != "newest":
        print("note: if the best was found in the middle of a step, between two micro batches, resuming is not exact")
    command = read_json(run / "summary.json").get("continue_command", f"the same command, with --run {run.name}")
    print(f"continue with: {command}")


def _move(later: list[Entry], run: Path) -> int:
    """Move the marker first, then the best, then the newest, each with the most steps first; return how many moved.

    At whatever moment this is killed, the next start resumes from something no later than before: without DONE it
    resumes at all; the best count only if nothing else is left, so they must be gone before that happens; and every
    move takes away the state that a start would have chosen, never one below it.
    """
    if (run / "DONE").exists():
        os.replace(run / "DONE", run / f"DONE.{ASIDE}")
    for entry in sorted(later, key=lambda entry: (entry.kind == "newest", -(entry.step or 0))):
        (run / FOLDER / ASIDE).mkdir(exist_ok=True)
        entry.path.rename(free_name(run / FOLDER / ASIDE / entry.path.name))
    return len(later)
