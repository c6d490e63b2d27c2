"""Classify the images of a folder: one folder per class, augmentation in training, held-out accuracy.

python train.py, or: distributed train --script train.py --nproc-per-node 2
"""

import os
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from distributed import Trainer

FOLDER = Path("digits")  # your images: FOLDER/CLASS/NAME.png, all of one size


def write_digits() -> None:
    """Write 1,797 handwritten digits as PNG files. Several processes may do so at once, with the same bytes."""
    for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        path = FOLDER / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels.reshape(8, 8) * 15.9375).astype("uint8")).resize((16, 16))
        image.save(part := path.with_suffix(f".{os.getpid()}"), "PNG")
        part.replace(path)


class ImageFolder(torch.utils.data.Dataset):
    """Images [1, height, width] from 0 to 1, and their classes. Every fifth image is held out of training."""

    def __init__(self, train: bool) -> None:
        paths = sorted(FOLDER.glob("*/*.png"), key=lambda path: path.name)
        self.paths = [path for number, path in enumerate(paths) if (number % 5 > 0) == train]
        self.classes, self.train = sorted({path.parent.name for path in paths}), train

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.paths[index]).convert("L")
        if self.train:  # torch's random numbers depend on the seed, the epoch and the sample, not on the process
            angle, *shift = (torch.rand(3) * 2 - 1).tolist()
            image = image.rotate(10 * angle, Image.Resampling.BILINEAR, translate=[round(1.4 * part) for part in shift])
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) / 255
        return pixels.view(1, image.height, image.width), self.classes.index(self.paths[index].parent.name)


def net() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


if __name__ == "__main__":
    write_digits()  # drop this line and the function to train on images of your own
    held_out = ImageFolder(train=False)
    trainer = Trainer(net, Path(__file__).with_name("config.yaml"))
    history = trainer.fit(ImageFolder(train=True), held_out)
    if trainer.is_main_process:
        print(f"held-out accuracy {history.rows[-1]['val_accuracy']:.4f}")
