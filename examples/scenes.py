"""Scenes to segment: handwritten digits laid over photographs and textures, with the exact mask of their ink.

Nothing is downloaded: the digits ship inside scikit-learn, the pictures inside scikit-image. Scenes have unequal
sizes and are padded to one, so micro-batches hold unequal numbers of supervised pixels, as real ones do. Digits and
pictures of the validation scenes are never seen in training.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import skimage
import torch
from numpy.typing import NDArray
from skimage.io import imread
from skimage.transform import resize
from sklearn.datasets import load_digits

SIDE = 48  # pixels, after padding
VOID = 255  # the label of padding: no pixel of the scene, not supervised
INK = 1  # the label of a digit's ink; 0 is everything else

TRAINING_PICTURES = (
    "astronaut.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "hubble_deep_field.jpg",
    "rocket.jpg",
)
VALIDATION_PICTURES = ("brick.png", "gravel.png", "moon.png", "motorcycle_left.png")
TRAINING_DIGITS = slice(0, 1500)  # of scikit-learn's 1797
VALIDATION_DIGITS = slice(1500, None)

Picture = NDArray[np.float32]


def scenes(count: int, *, validation: bool = False, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` scenes: images (count, 3, SIDE, SIDE) in [-0.5, 0.5], channels last, and labels (count, SIDE, SIDE)."""
    random = np.random.default_rng([seed, int(validation)])
    pictures = _pictures(VALIDATION_PICTURES if validation else TRAINING_PICTURES)
    digits = load_digits().images[VALIDATION_DIGITS if validation else TRAINING_DIGITS] / 16.0
    images = np.full((count, SIDE, SIDE, 3), 0.5, np.float32)
    labels = np.full((count, SIDE, SIDE), VOID, np.int64)
    for image, label in zip(images, labels, strict=True):
        height, width = random.integers(SIDE * 5 // 8, SIDE + 1, size=2)
        scene, mask = image[:height, :width], label[:height, :width]
        scene[:] = _crop(pictures[random.integers(len(pictures))], height, width, random)
        mask[:] = 0
        for _ in range(random.integers(1, 4)):
            _lay(digits[random.integers(len(digits))], scene, mask, random)
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2) - 0.5
    return tensor.contiguous(memory_format=torch.channels_last), torch.from_numpy(labels)


def _pictures(names: tuple[str, ...]) -> list[Picture]:
    """Those of the named pictures that this scikit-image carries in its own package, as RGB in [0, 1]."""
    folder = Path(skimage.__file__).parent / "data"
    found = [imread(folder / name) for name in names if (folder / name).exists()]
    if not found:
        raise SystemExit(f"none of {', '.join(names)} in {folder}: this scikit-image ships no pictures")
    coloured = [
        np.repeat(picture[..., None], 3, axis=2) if picture.ndim == 2 else picture[..., :3] for picture in found
    ]
    return [picture.astype(np.float32) / 255.0 for picture in coloured]


def _crop(picture: Picture, height: int, width: int, random: np.random.Generator) -> Picture:
    top = random.integers(picture.shape[0] - height + 1)
    left = random.integers(picture.shape[1] - width + 1)
    return picture[top : top + height, left : left + width]


def _lay(digit: NDArray[np.float64], scene: Picture, mask: NDArray[np.int64], random: np.random.Generator) -> None:
    """Paint one digit somewhere, in an ink that can be told from what it covers, and mark its pixels."""
    size = int(random.integers(SIDE * 3 // 8, SIDE * 5 // 8 + 1))
    top = random.integers(scene.shape[0] - size + 1)
    left = random.integers(scene.shape[1] - size + 1)
    where = np.s_[top : top + size, left : left + size]
    covered = scene[where].mean(axis=(0, 1))
    ink = random.random(3)
    while np.abs(ink - covered).mean() < 0.35:
        ink = random.random(3)
    strokes = resize(digit, (size, size), order=1)
    opacity = np.clip(strokes * 8 - 3.5, 0, 1)[..., None]  # half opaque exactly where the stroke's edge is
    scene[where] = scene[where] * (1 - opacity) + ink * opacity
    mask[where][strokes > 0.5] = INK
