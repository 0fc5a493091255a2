"""What rank 0 decides before training, and that nobody waits for it in vain."""

from types import SimpleNamespace
from typing import Any

import pytest

from src.engine.agreement import agree
from src.engine.errors import AgreedError, UserError
from src.engine.run.directory import Run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [(UserError("no"), 2, "no"), (PermissionError("not yours"), 1, "PermissionError: not yours")],
)
def test_whatever_stops_rank_0_is_told_to_the_others(
    error: Exception, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of any kind is broadcast, for the others wait for an answer; an unforeseen one leaves its traceback."""
    told: list[Any] = []

    def broadcast(answer: Any) -> Any:
        told.append(answer)
        return answer

    def decide() -> Run:
        raise error

    here = SimpleNamespace(creates_processes_externally=True)
    strategy = SimpleNamespace(cluster_environment=here, setup_environment=lambda: None, broadcast=broadcast)
    trainer: Any = SimpleNamespace(world_size=2, is_global_zero=True, strategy=strategy)
    with pytest.raises(AgreedError, match=f"^{text}$") as raised:
        agree(trainer, decide)
    assert raised.value.exit_code == code
    assert told == [{"refused": text, "exit_code": code}]
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)
