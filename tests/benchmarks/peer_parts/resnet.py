"""ResNet-50 in plain PyTorch, with as many parameters as ours: the stride is in the 3x3 convolution ("v1.5")."""

import torch
from torch import nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of blocks."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which the first block of a stage projects."""

    def __init__(self, channels: int, width: int, stride: int, *, project: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        projection = (nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.shortcut = nn.Sequential(*projection) if project else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images of `4 * width` channels."""
        return torch.relu(self.body(images) + self.shortcut(images))


class ResNet50(nn.Module):
    """Logits of images `(batch, bands, height, width)`."""

    def __init__(self, bands: int = 12, classes: int = 43) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(bands, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        for stage, (width, blocks) in enumerate(STAGES):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(channels, width, stride, project=not block))
                channels = 4 * width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits `(batch, classes)`."""
        return self.layers(images)  # type: ignore[no-any-return]


def random_batch(seed: int, batch_size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ready float images and multi-hot targets."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn((batch_size, 12, side, side), generator=generator)
    return images, (torch.rand((batch_size, 43), generator=generator) > 0.9).float()
