"""`rollback`: let the next start go on from an earlier step, without deleting anything."""

import os
from pathlib import Path

from src.checkpoint.entries import FOLDER, Entry, candidates, steps_there
from src.checkpoint.files import fault
from src.checkpoint.put_aside import free_name
from src.checkpoint.status import SILENT, State, state_of
from src.errors import UserError
from src.lock import hold, owner, release

ASIDE = "rolled-back"


def roll_back(run: Path, before_step: int) -> None:
    """Move every checkpoint of `before_step` or more steps aside and say where the next start goes on.

    Metrics and TensorBoard files are cut back by the start itself.

    Raises:
        UserError: the run is being trained, or no whole checkpoint has fewer steps; nothing is changed.

    """
    if (holder := owner(run)) is not None:
        raise UserError(f"run {run.name} is being trained right now by {holder}: stop it, then roll back")
    state = state_of(run)
    earlier = [entry for entry in candidates(run) if (entry.step or 0) < before_step and not entry.weights_only]
    target = next((entry for entry in earlier if fault(entry.path) is None), None)
    if target is None:
        damaged = f" ({len(earlier)} damaged)" if earlier else ""
        raise UserError(
            f"run {run.name} has no whole checkpoint before step {before_step}{damaged}, so nothing is changed; "
            f"{steps_there(run)}"
        )
    hold(run)  # nobody may start it while files move
    try:
        moved = _move([entry for entry in candidates(run) if (entry.step or 0) >= before_step], run)
    finally:
        release()
    _say(run, state, target, moved)


def _move(later: list[Entry], run: Path) -> list[Path]:
    """The marker first, then the best, then the newest, each with the most steps first.

    Whatever moment it is killed at, the next start goes on from something no later than before: without DONE it
    continues at all; as the best count only where nothing else is left, they must be gone before that happens; and
    every move takes away the state that a start would have chosen, never one below it.
    """
    if (run / "DONE").exists():
        os.replace(run / "DONE", run / f"DONE.{ASIDE}")
    moved = []
    for entry in sorted(later, key=lambda entry: (entry.kind == "newest", -(entry.step or 0))):
        (run / FOLDER / ASIDE).mkdir(exist_ok=True)
        target = free_name(run / FOLDER / ASIDE / entry.path.name)
        entry.path.rename(target)
        moved.append(target)
    return moved


def _say(run: Path, state: State, target: Entry, moved: list[Path]) -> None:
    print(f"moved {len(moved)} checkpoints to {run / FOLDER / ASIDE}" if moved else "no checkpoint is that late")
    print(f"the next start of run {run.name} goes on from step {target.step}, {target.path.name}")
    if target.kind != "newest":
        print(
            "note: where a validation in the middle of a step, between two micro batches, found it, the run does not "
            "end bit for bit as it would have"
        )
    if state.name == "running":
        print(
            f"note: less than {SILENT} s ago the run gave a sign of life; nobody trains it as far as this machine "
            "sees, but one that does on another must be stopped first"
        )
    print(f"continue with: {state.summary.get('continue_command') or f'the command of before, with --run {run.name}'}")
