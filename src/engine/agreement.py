"""Let rank 0 decide for all ranks before training, when there may be no process group yet."""

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning import Trainer

from src.engine import exit_codes
from src.engine.errors import AgreedError, UserError
from src.engine.run.directory import Run

DECISION = "LIGHTNING_RUN_DECISION"  # how the processes that Lightning starts learn it


def agree(trainer: Trainer, decide: Callable[[], Run]) -> Run:
    """Return on every rank the run that `decide` finds or makes on rank 0; an error of rank 0's is raised on all.

    Under srun and torchrun all ranks are here already, so the process group starts now and rank 0 tells the others.
    Where Lightning starts the other processes later, they inherit the decision through the environment.
    """
    strategy: Any = trainer.strategy
    if trainer.world_size == 1:
        return decide()
    if decision := os.environ.get(DECISION):
        return Run(**json.loads(decision))
    if not strategy.cluster_environment.creates_processes_externally:  # this is rank 0 and alone so far
        run = decide()
        os.environ[DECISION] = json.dumps(asdict(run))
        return run
    strategy.setup_environment()  # Lightning calls it again and finds the group there
    answer: dict[str, Any] = {}
    if trainer.is_global_zero:
        try:
            answer = asdict(decide())
        except UserError as error:
            answer = {"refused": str(error), "exit_code": error.exit_code}
        except Exception as error:  # the others wait for an answer
            traceback.print_exc()
            answer = {"refused": f"{type(error).__name__}: {error}", "exit_code": exit_codes.CRASHED}
    answer = strategy.broadcast(answer)
    if "refused" in answer:
        raise AgreedError(answer["refused"], answer["exit_code"])
    return Run(**answer)
