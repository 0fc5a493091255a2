import pytest
import torch

from src.engine.sharding.wrapping import find_blocks
from src.models.resnet import Block, ResNet


def resnet(**settings) -> ResNet:
    torch.manual_seed(0)
    return ResNet(**{"width": 8} | settings)


@pytest.mark.parametrize(
    ("settings", "image", "classes"),
    [
        ({}, (1, 8, 8), 10),
        ({"channels": 3, "classes": 7}, (3, 16, 16), 7),
        ({"stages": 1}, (1, 5, 9), 10),
        ({"stages": 3}, (1, 7, 7), 10),
    ],
)
def test_images_of_any_size_become_logits(settings, image, classes):
    """Any image size, odd ones too, gives one row of logits per image."""
    assert resnet(**settings)(torch.rand(4, *image)).shape == (4, classes)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_stage_doubles_channels_and_halves_the_image(stages):
    """A stage is two blocks, which BLOCKS names; each after the first doubles the channels and halves the image."""
    model = resnet(stages=stages)
    assert sum(isinstance(module, Block) for module in model.modules()) == 2 * stages
    assert len(find_blocks(model)) == 2 * stages
    features = model.blocks(model.stem(torch.rand(1, 1, 16, 16)))
    assert features.shape == (1, 8 * 2 ** (stages - 1), 16 // 2 ** (stages - 1), 16 // 2 ** (stages - 1))


def test_a_result_does_not_depend_on_the_batch():
    """An image has the same logits alone and among others, in training too."""
    model, images = resnet().train(), torch.rand(6, 1, 8, 8)
    together = model(images)
    alone = torch.cat([model(image[None]) for image in images])
    assert torch.allclose(together, alone, atol=1e-6)
    assert not torch.allclose(together[0], together[1])


def test_every_parameter_learns():
    """Each parameter gets a gradient, as DDP requires."""
    model = resnet(stages=3)
    model(torch.rand(2, 1, 8, 8)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
