import pytest


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own commands, where a test forgets to stand in for one, find no cluster. The real one: cluster/."""
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")
