"""Numbers of the FedCV paper (He et al. 2021, arXiv 2111.11066, Tables 2 and 11 to 15), by setting.

Test accuracy in percent of one seed: the best of the paper's learning rates with momentum and no scheduler,
which the setting has. Those of segmentation (Table 5) are on VOC and SBD at 512 pixels, for which there is no
setting; of detection the paper has no table.
"""

from __future__ import annotations

from collections.abc import Mapping

ACCURACY: Mapping[str, float] = {
    "cifar100-efficientnet-c": 60.58,
    "cifar100-efficientnet-sfl-a0.1": 23.06,
    "cifar100-efficientnet-sfl-a0.5": 43.3,
    "cifar100-efficientnet-sfl-a100": 41.76,
    "cifar100-efficientnet-ft-a0.1": 42.95,
    "cifar100-efficientnet-ft-a0.5": 55.02,
    "cifar100-efficientnet-ft-a100": 61.58,
    "cifar100-mobilenetv3-c": 57.85,
    "cifar100-mobilenetv3-sfl-a0.1": 28.47,
    "cifar100-mobilenetv3-sfl-a0.5": 44.18,
    "cifar100-mobilenetv3-sfl-a100": 47.64,
    "cifar100-mobilenetv3-ft-a0.1": 42.76,
    "cifar100-mobilenetv3-ft-a0.5": 46.91,
    "cifar100-mobilenetv3-ft-a100": 52.03,
    "gld23k-efficientnet-c": 88.26,
    "gld23k-efficientnet-sfl": 59.01,
    "gld23k-efficientnet-ft": 80.35,
    "gld23k-mobilenetv3-c": 88.51,
    "gld23k-mobilenetv3-sfl": 59.11,
    "gld23k-mobilenetv3-ft": 78.41,
    "gld23k-vit-c": 75.65,
    "gld23k-vit-ft": 76.11,
}
DATA: Mapping[str, tuple[int, int]] = {"cifar100": (100, 50_000), "gld23k": (203, 23_080)}
"""Classes and training images of the paper's data, by what its settings begin with."""
