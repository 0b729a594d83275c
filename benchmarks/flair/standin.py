"""A local stand-in for ImageNet weights: the fine-tuning (F) rows run where nothing can be downloaded.

    python -m benchmarks.flair.standin --output_file data/standin.safetensors [--method pretrain|random]

``pretrain``: torchvision's network, BatchNorm and all, is trained on a mini data set of *other* users, drawn
from another seed, so that fine-tuning on the mini set has something to start from. ``random``: untrained
weights. The file says of itself which it is, and every table shows it: such a row is not comparable
with the paper.

Shape letters: N images, K labels, S side in pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torchvision import models as zoo
from tqdm import tqdm

from benchmarks.core.commands import command_parser
from dataset.cli import run
from dataset.flair.mini import COARSE_LABELS, MiniSpec, draw_images, mini_index
from pfl_ext.checkpoint import save
from pfl_ext.data.transforms import IMAGENET_MEAN, IMAGENET_STD, normalise, resize
from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.randomness import stream, torch_stream
from pfl_ext.tasks.multi_label import MultiLabel

BATCH = 64


def live_network(arch: str, seed: int) -> torch.nn.Module:
    """torchvision's network with its own, live BatchNorm; its weights a function of the seed."""
    generator = torch_stream(seed, "stand-in weights")
    start = build_backbone(ModelConfig(arch, pretrained=True), len(COARSE_LABELS), generator)
    with torch.random.fork_rng(devices=[]):  # torchvision's constructor draws, for nothing
        network: torch.nn.Module = zoo.get_model(arch, weights=None, num_classes=len(COARSE_LABELS))
    network.load_state_dict(start.state_dict(), strict=False)  # all but num_batches_tracked
    return network


def pretrain(network: torch.nn.Module, spec: MiniSpec, epochs: int, learning_rate: float) -> float:
    """Adam on all training images of a drawn data set; the mean loss of the last epoch."""
    index = mini_index(spec)
    split = index.splits["train"]
    images = draw_images(spec, index, "train", np.arange(split.num_images))  # [N, S, S, 3]
    targets = split.labels["labels"].dense(np.arange(split.num_images))  # [N, K]
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    network.train()
    total = 0.0
    for epoch in range(epochs):
        order, total = stream(spec.seed, "stand-in epoch", epoch).permutation(len(images)), 0.0
        starts = range(0, len(order) - len(order) % BATCH or 1, BATCH)
        for start in tqdm(starts, desc=f"pre-training, epoch {epoch + 1} of {epochs}", disable=None):
            rows = order[start : start + BATCH]
            pixels = resize(torch.from_numpy(images[rows]), spec.image_size)
            pixels = normalise(pixels, IMAGENET_MEAN, IMAGENET_STD)
            loss = MultiLabel().loss(network(pixels), torch.from_numpy(targets[rows]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) / len(starts)
    return total


def main(argv: Sequence[str]) -> None:
    """Make a local stand-in for ImageNet weights."""
    parser = command_parser("flair.standin", main.__doc__)
    parser.add_argument("--output_file", type=Path, required=True, help="a name that ends in .safetensors")
    parser.add_argument("--method", choices=("pretrain", "random"), default="pretrain")
    parser.add_argument("--arch", default="resnet18", help="a classifier of torchvision")
    parser.add_argument("--users", type=int, default=600, help="users of the drawn data set")
    parser.add_argument("--image_size", type=int, default=32, help="pixels")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1, help="seed of the drawn users and the first weights")
    args = parser.parse_args(argv)
    if args.output_file.suffix != ".safetensors":
        raise ValueError(f"--output_file {args.output_file}: the name must end in .safetensors")
    if args.epochs < 1 or args.learning_rate <= 0:
        raise ValueError("--epochs must be at least 1 and --learning_rate above 0")
    spec = MiniSpec(
        train_users=args.users, val_users=1, test_users=1, image_size=args.image_size, seed=args.seed,
        num_fine_labels=68, difficulty=0.25,
    )  # fmt: skip
    network = live_network(args.arch, args.seed)
    kind = f"random weights (seed {args.seed})"
    if args.method == "pretrain":
        loss = pretrain(network, spec, args.epochs, args.learning_rate)
        drawn = f"{args.users} drawn users (mini seed {args.seed})"
        kind = f"{args.epochs} epochs on {drawn}, last loss {loss:.3f}"
    description = f"STAND-IN, not ImageNet: {kind}"
    save(args.output_file, network.state_dict(), {"description": description})
    print(f"wrote {args.output_file}: {description}")


if __name__ == "__main__":
    sys.exit(run(main))
