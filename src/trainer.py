"""Lightning's Trainer as the command line sees it."""

from typing import Any

from lightning import Trainer

from src.checkpoint.restore import Restore


class ProjectTrainer(Trainer):
    """Lightning's Trainer with two corrections of its command line, which loads no checkpoint that it is not given.

    `precision` may also be `auto`. And a limit of 1 stays the number 1: under the types that Lightning declares, the
    parser reads it as 1.0, which means all batches.
    """

    def __init__(
        self,
        *args: Any,
        precision: str | int = "auto",
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        **kwargs: Any,
    ) -> None:
        limits = {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
            "overfit_batches": overfit_batches,
        }
        super().__init__(*args, precision=precision, **limits, **kwargs)  # type: ignore[arg-type]  # resolved by then
        self._checkpoint_connector = Restore(self)
