"""Ranks that do not see one run directory."""

from pathlib import Path

import pytest
import torch

from src.engine.errors import AgreedError
from src.engine.run import storage


def ask(rank: int, folders: list[str], rendezvous: str, answers: str) -> None:
    """One rank of a group of two, with a folder of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        storage.refuse_unshared(Path(folders[rank]))
        answer = "all see it"
    except AgreedError as error:
        answer = str(error)
    (Path(answers) / str(rank)).write_text(answer)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_see_another_folder_are_found(shared: bool, tmp_path: Path) -> None:
    """Every rank is told which one does not see rank 0's run directory; a shared one passes and stays as it was."""
    folders = [tmp_path / "a", tmp_path / ("a" if shared else "b")]
    answers = tmp_path / "answers"
    for folder in {*folders, answers}:
        folder.mkdir()
    arguments = ([str(folder) for folder in folders], str(tmp_path / "meet"), str(answers))
    torch.multiprocessing.spawn(ask, arguments, nprocs=2)
    for rank in range(2):
        answer = (answers / str(rank)).read_text()
        if shared:
            assert answer == "all see it"
        else:
            assert "is not there for rank 1 on" in answer
            assert "set RUN_ROOT to a folder that all nodes share" in answer
    assert list(folders[0].iterdir()) == []


def test_a_folder_that_rank_0_cannot_write_to_is_said_by_all(tmp_path: Path) -> None:
    """Rank 0's error reaches the other rank, which would wait for it."""
    folders, answers = [tmp_path / "gone", tmp_path / "b"], tmp_path / "answers"
    for folder in (folders[1], answers):
        folder.mkdir()
    arguments = ([str(folder) for folder in folders], str(tmp_path / "meet"), str(answers))
    torch.multiprocessing.spawn(ask, arguments, nprocs=2)
    for rank in range(2):
        assert "cannot be written to (No such file or directory)" in (answers / str(rank)).read_text()
