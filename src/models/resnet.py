"""A small residual network for small images. GroupNorm, not BatchNorm: a result does not depend on the batch."""

import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut; the first may halve the resolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.shortcut(x) + self.norm_2(self.conv_2(y)))


class ResNet(nn.Module):
    """Stages of two blocks; each stage after the first halves the resolution and doubles the channels.

    Args:
        channels: of the input image
        classes: number of logits
        width: channels of the first stage, a multiple of 8
        stages: number of stages

    """

    BLOCKS = (Block,)

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 32, stages: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.Sequential()
        for stage in range(stages):
            outputs = width * 2**stage
            self.blocks.append(Block(outputs if stage == 0 else outputs // 2, outputs, stride=1 if stage == 0 else 2))
            self.blocks.append(Block(outputs, outputs, stride=1))
        self.head = nn.Linear(width * 2 ** (stages - 1), classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) -> logits (B, classes)."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
