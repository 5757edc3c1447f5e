"""Residual networks (He et al. 2016), without the pretrained weights and data sets that a package brings along."""

from __future__ import annotations

from torch import Tensor, nn

_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


class _Residual(nn.Module):
    """A residual block; with a bottleneck its output has four times the width."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        shapes = (
            [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
            if bottleneck
            else [(channels, width, 3, stride), (width, out, 3, 1)]
        )
        layers: list[nn.Module] = []
        for into, outof, kernel, step in shapes:
            layers += [
                nn.Conv2d(into, outof, kernel, step, padding=kernel // 2, bias=False),
                nn.BatchNorm2d(outof),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (n, channels, h, w) to (n, out, h / stride, w / stride)."""
        return nn.functional.relu(self.body(inputs) + self.shortcut(inputs))


def resnet(depth: int, *, classes: int, width: int = 64, shrink: int = 1) -> nn.Sequential:
    """A residual network for images of shape (n, 3, h, w).

    Args:
        depth: 18 or 50.
        classes: Number of its answers.
        width: Channels of its first layers.
        shrink: Divides the number of its blocks, of which one of each kind is left.
    """
    bottleneck = depth == 50
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = width
    for stage, blocks in enumerate(_BLOCKS[depth]):
        for block in range(max(1, blocks // shrink)):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(_Residual(channels, width << stage, stride, bottleneck=bottleneck))
            channels = (width << stage) * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
