"""Shapes of the gradients that are exchanged without a network."""

SMALL = [(3, 3, 64, 64), (64,), (256, 43), (43,)]
"""For smoke runs."""
SCALED = [(3, 3, 512, 512), (1, 1, 1024, 2048), (512,), (2048,)]
"""18 MB: the memory of 8 ranks with a whole network's gradient is more than one machine has."""


def resnet50(bands=12, classes=43):
    """Shapes of all gradients: kernels, gains and shifts, and the head; 23.6 million elements."""
    kernels, channels = [(7, 7, bands, 64)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels += [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            kernels += [(1, 1, channels, 4 * width)] if block == 0 else []
            channels = 4 * width
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:], kernel[-1:])] + [(2048, classes), (classes,)]
