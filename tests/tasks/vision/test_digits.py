import sys

import pytest
import torch

from src.engine.errors import UserError
from src.tasks.vision import Digits
from tests.tiny import quiet_trainer


def digits(**settings) -> Digits:
    data = Digits(**settings)
    data.setup("fit")
    return data


def test_without_scikit_learn_the_way_to_it_is_said(monkeypatch):
    """Where scikit-learn is missing, the refusal has the command that installs it."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[vision\]'"):
        digits()


def test_the_images_are_split_once_and_for_all():
    """Train, validation and test are 70, 15 and 15 % of the 1797 images, share none, and are the same every time."""
    data, again = digits(), digits()
    sets = [data.train_set, data.val_set, data.test_set]
    assert [len(part) for part in sets] == [1257, 270, 270]
    assert torch.equal(data.test_set.tensors[0], again.test_set.tensors[0])
    rows = [tuple(image.flatten().tolist()) for part in sets for image in part.tensors[0]]
    assert len(set(rows)) == 1797


def test_images_are_scaled_and_every_label_is_there():
    """Images are 1 × 8 × 8 between 0 and 1, labels 0 to 9, and each split has every label."""
    data = digits()
    for part in (data.train_set, data.val_set, data.test_set):
        images, labels = part.tensors
        assert images.shape[1:] == (1, 8, 8)
        assert (images.min(), images.max()) == (0, 1)
        assert sorted(set(labels.tolist())) == list(range(10))


def test_images_go_with_their_labels():
    """Most test images are nearest to the mean training image of their own label."""
    data = digits()
    images, labels = data.train_set.tensors
    means = torch.stack([images[labels == label].mean(0) for label in range(10)]).flatten(1)
    images, labels = data.test_set.tensors
    nearest = torch.cdist(images.flatten(1), means).argmin(1)
    assert (nearest == labels).float().mean() > 0.8


def test_loaders_take_the_batch_size():
    """Batches have the size that was set, and only training is shuffled."""
    data = digits(batch_size=100)
    data.trainer = quiet_trainer()
    assert [len(labels) for _, labels in data.val_dataloader()] == [100, 100, 70]
    assert torch.equal(torch.cat([labels for _, labels in data.test_dataloader()]), data.test_set.tensors[1])
    assert torch.equal(torch.cat([labels for _, labels in data.predict_dataloader()]), data.test_set.tensors[1])
    trained = torch.cat([labels for _, labels in data.train_dataloader()])
    assert not torch.equal(trained, data.train_set.tensors[1])
    assert torch.equal(trained.bincount(), data.train_set.tensors[1].bincount())
