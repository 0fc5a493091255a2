from types import SimpleNamespace
from typing import Any

import pytest
import torch

from src.engine.callbacks import predictions
from src.engine.callbacks.predictions import WritePredictions
from src.engine.data.loader import GlobalBatchSampler
from tests.tiny import Line, loader, quiet_trainer


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_predictions_are_one_file_in_the_data_sets_order(tmp_path, capsys):
    """`predict` writes what predict_step returned, batch by batch, readable without running code, and says where."""
    path = tmp_path / "predictions.pt"
    trainer = quiet_trainer(callbacks=[WritePredictions(path)])
    data = torch.arange(10.0)[:, None]
    trainer.predict(Line(start=2.0), loader(trainer, data, 4, train=False), return_predictions=False)
    batches = torch.load(path, weights_only=True)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.equal(torch.cat(batches), 2 * data)
    assert f"predictions of 3 batches: {path}" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.pt"]


@pytest.mark.parametrize("size", [8, 13, 14, 15, 16])
def test_ranks_are_put_together_in_the_data_sets_order(tmp_path, monkeypatch, size):
    """What 3 ranks predicted is joined in the order of the data, also where the last chunk leaves ranks without."""
    parts = [list(GlobalBatchSampler(size, 2, train=False, rank=rank, world_size=3)) for rank in range(3)]

    monkeypatch.setattr(predictions, "gather_objects", lambda _: parts)
    writers = [WritePredictions(tmp_path / f"{rank}.pt") for rank in range(3)]
    for rank, writer in enumerate(writers):
        trainer: Any = SimpleNamespace(world_size=3, is_global_zero=rank == 0)
        writer.write_on_epoch_end(trainer, Line(), parts[rank], None)
    assert [file.name for file in tmp_path.iterdir()] == ["0.pt"]
    joined = torch.load(tmp_path / "0.pt", weights_only=True)
    assert [index for batch in joined for index in batch] == list(range(size))
