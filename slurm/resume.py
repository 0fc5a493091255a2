"""Submit a run again as it was, with the code it had and, if asked, other settings for training."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from slurm import submit
from slurm.errors import LaunchError
from slurm.status import State, records


def resume(chosen: Sequence[State], name: str, overrides: Sequence[str]) -> int:
    """Submit the run again, or of a grid the points that are not finished.

    `name` is what the user called them. `overrides` are options for training, which the run keeps from then on.
    """
    open_runs = [state.run for state in chosen if state.state != "FINISHED" and not state.live]
    for state in (state for state in chosen if state.live):
        line = f"run {state.run} has job {state.live[0]} ({state.state})"
        if overrides or not open_runs:
            raise LaunchError(f"{line}: nothing to resume (cancel ends it)")
        print(f"{line}: it is left alone")
    if not open_runs:
        print(f"run {name} is finished: nothing to submit")
        return 0
    record = _newest_training(chosen[0])
    _refuse_overrides(overrides, record, name)
    argv = [*record["argv"], *([] if "--" in record["argv"] or not overrides else ["--"]), *overrides]
    cut = argv.index("--") if "--" in argv else len(argv)
    more = ["--name", record["name"], "--code", record["code"]]
    if record["points"]:
        more += ["--points", ",".join(str(int(run.removeprefix(f"{record['name']}-"))) for run in open_runs)]
    os.environ["RUN_ROOT"] = str(chosen[0].folder.parent)  # it may be relative to the folder that is left now
    if os.path.isdir(record["folder"]):  # where its relative paths start
        os.chdir(record["folder"])
    return submit.main([*argv[:cut], *more, *argv[cut:]])


def _refuse_overrides(overrides: Sequence[str], record: Mapping[str, Any], name: str) -> None:
    options = [word.split("=")[0] for word in overrides]
    axes = {axis for point in record["points"] or () for axis in point}
    if axes and overrides and name != record["name"]:
        raise LaunchError(
            f"{name} is of the grid {record['name']}, whose runs have their settings in common: "
            f"resume {record['name']} -- … for all that are not finished"
        )
    if varied := [option for option in options if option.removeprefix("--") in axes]:
        raise LaunchError(f"{varied[0]} is what the grid {name} varies: submit other values as another grid")
    foreign = [option for option in options if option in ("--config", "-c") or submit.misplaced([option])]
    if foreign or (overrides and not overrides[0].startswith("-")):
        raise LaunchError(
            f"{(foreign or overrides)[0]} is no setting of training: python slurm/submit.py --name {name} … submits "
            "the run with other files, nodes or limits"
        )


def _newest_training(state: State) -> Mapping[str, Any]:
    """Return the newest record of a training of the run, and not of an evaluation; without one its newest record."""
    rows = records(state.folder.parent)[state.run]
    trained = [row for row in rows if str(row.get("command", "")).startswith("python -m src.cli fit")]
    return trained[-1] if trained else state.record
