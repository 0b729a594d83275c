"""Download CIFAR-100 and its federated splits, or take local copies, and make one HDF5 file of them.

    python -m dataset.cifar100.download_preprocess --output_file F [--source URL-or-DIR] \
        [--splits none|official|DIR]

The labels are the 100 fine ones, as in the paper; for the options, see `dataset.cifar10.download_preprocess`.
"""

from __future__ import annotations

import sys
from functools import partial

from dataset.cifar10 import preprocess as cifar_preprocess
from dataset.cifar10.source import Cifar
from dataset.cli import run

CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR100 = Cifar(
    name="cifar100",
    classes=tuple(CLASSES.split()),
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    members={"train": ["train.bin"], "test": ["test.bin"]},
    label_bytes=2,
    label_column="fine_label",
    splits_archive="cifar100_v1.1.zip",
    old_splits="cifar100.zip",
    official={},
)


main = partial(cifar_preprocess.main, CIFAR100)
"""The command line."""

if __name__ == "__main__":
    sys.exit(run(main))
