"""A run submitted again as it was, with the code it had and, where asked, other settings for training."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from slurm import submit
from slurm.errors import LaunchError
from slurm.states import State, records


def resume(found: Sequence[State], name: str, overrides: Sequence[str]) -> int:
    """Submit a run again as it was submitted, with the code it had; of a grid the points that are not finished.

    Args:
        found: the run, or a grid's runs
        name: what the user called them
        overrides: options for training, behind those it was submitted with; from then on they are the run's

    """
    open_runs = [state.run for state in found if state.state != "FINISHED" and not state.live]
    for state in (state for state in found if state.live):
        held = f"run {state.run} has job {state.live[0]} ({state.state})"
        if overrides or not open_runs:
            raise LaunchError(f"{held}: nothing to resume (cancel ends it)")
        print(f"{held}: it is left alone")
    if not open_runs:
        print(f"run {name} is finished: nothing to submit")
        return 0
    record = _newest_training(found[0])
    _refuse_overrides(overrides, record, name)
    argv = [*record["argv"], *([] if "--" in record["argv"] or not overrides else ["--"]), *overrides]
    cut = argv.index("--") if "--" in argv else len(argv)
    more = ["--name", record["name"], "--code", record["code"]]
    if record["points"]:
        more += ["--points", ",".join(str(int(run.removeprefix(f"{record['name']}-"))) for run in open_runs)]
    os.environ["RUN_ROOT"] = str(found[0].folder.parent)  # which may have been given relative to where this is run
    if os.path.isdir(record["folder"]):  # from where its relative paths start
        os.chdir(record["folder"])
    return submit.main([*argv[:cut], *more, *argv[cut:]])


def _refuse_overrides(overrides: Sequence[str], record: Mapping[str, Any], name: str) -> None:
    options = [part.split("=")[0] for part in overrides]
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
    """How the run was submitted last to be trained, and not to be evaluated; else how it was last submitted."""
    rows = records(state.folder.parent)[state.run]
    trained = [row for row in rows if str(row.get("command", "")).startswith("python -m src.cli fit")]
    return trained[-1] if trained else state.record
