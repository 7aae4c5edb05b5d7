"""Images of any size as patches and tokens: the rules of models that read them at the size that they come in."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrid:
    """Patches of ``patch`` pixels a side, ``merge`` x ``merge`` of which the language model reads as one token, and
    ``row_tokens`` behind each row of these. An image larger than ``most_side`` on a side is scaled down (0: none is);
    one of fewer or more pixels than ``least_pixels`` and ``most_pixels`` (0: no bound) is scaled to those.

    >>> qwen = ImageGrid(patch=14, merge=2, least_pixels=3136, most_pixels=12845056)
    >>> qwen.sized(1280, 720), qwen.sized(20, 20)
    ((4784, 1196), (16, 4))
    >>> pixtral = ImageGrid(patch=16, merge=1, most_side=1024, row_tokens=1)
    >>> pixtral.sized(2048, 1000)
    (2048, 2080)
    """

    patch: int
    merge: int = 1
    least_pixels: int = 0
    most_pixels: int = 0
    most_side: int = 0
    row_tokens: int = 0

    def sized(self, width: int, height: int) -> tuple[int, int]:
        """Patches of an image, and tokens that the language model reads of it."""
        cell = self.patch * self.merge
        if self.most_side:  # Pixtral: cells that the image does not fill count whole
            ratio = max(width / self.most_side, height / self.most_side, 1.0)
            across, down = (max(1, math.ceil(math.floor(side / ratio) / cell)) for side in (width, height))
        else:  # Qwen2-VL's smart_resize: sides are rounded to cells
            across, down = (max(1, round(side / cell)) for side in (width, height))
            area = across * down * cell * cell
            if self.most_pixels and area > self.most_pixels:
                ratio = math.sqrt(width * height / self.most_pixels)
                across, down = (max(1, math.floor(side / ratio / cell)) for side in (width, height))
            elif area < self.least_pixels:
                ratio = math.sqrt(self.least_pixels / (width * height))
                across, down = (math.ceil(side * ratio / cell) for side in (width, height))
        return across * down * self.merge**2, down * (across + self.row_tokens)
