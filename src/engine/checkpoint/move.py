"""Move checkpoints to where no start looks for one to resume from; nothing is deleted or overwritten."""

from pathlib import Path

from src.engine.checkpoint.files import steps_inside


def move_to(folder: Path, target: Path, first: int) -> list[Path]:
    """Move what was saved after `first` steps or more to `target`; return where the moved files were.

    The step inside a file counts, not its name.
    """
    moved = []
    for path in sorted(folder.glob("*.ckpt")):
        try:
            if steps_inside(path) < first:
                continue
            target.mkdir(exist_ok=True)
            path.rename(free_name(target / path.name))
        except Exception as error:  # a torn file fails in many ways; whoever continues the run deals with it
            print(f"warning: {path} stays where it is ({type(error).__name__}: {error})".splitlines()[0])
            continue
        moved.append(path)
    return moved


def free_name(path: Path) -> Path:
    """Return `path`, or the same with a number where it is taken."""
    number, free = 2, path
    while free.exists():
        number, free = number + 1, path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
