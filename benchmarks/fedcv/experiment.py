"""What FedCV's benchmarks of masks and of boxes share: a view of the file, its partition, what is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from benchmarks.core.clients import FEW_BARS, FEW_USERS, OfClients
from benchmarks.core.config.benchmark import Run
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree
from benchmarks.core.single_users import trained_users
from dataset.arrays import Float32Array, IntArray
from dataset.cli import counted
from dataset.files import write_json
from dataset.flair.mini import MiniSpec
from dataset.partitions.drawn import deals_any, read_name
from dataset.partitions.of_file import alike
from dataset.store.annotated_view import AnnotatedView
from dataset.store.hdf5 import DataFile
from pfl_ext.algorithms.per_user import quantiles, spreads_by_group
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.evaluation import autocast_of

C = TypeVar("C", bound=TrainingConfig)
MINI = MiniSpec(
    train_users=40,
    val_users=12,
    test_users=20,
    image_size=64,
    num_fine_labels=17,
    difficulty=0.25,
    coarse_labels=2,
)
"""The mini data set that is drawn with boxes, and at another size with masks."""
SHOWN, OF_USERS = 8, 4
"""How many test images are drawn, and of how many users."""


class OfAnnotatedImages(OfClients[C]):
    """A run on images with masks or boxes. The config's data section also has ``val_share``."""

    target = "fedcv-data"
    view: AnnotatedView

    def __init__(self, run: Run[C], file: DataFile) -> None:
        data: Any = run.config.data
        if "test" not in file.splits and data.test_users is None:
            raise ValueError(
                f"{file.path} has no images of test: make it again with such images, or with --val_as test, "
                "which makes those of val the test images"
            )
        super().__init__(run, file, data.val_share)

    def description(self) -> str:
        """Classes and partition."""
        classes = counted(len(self.view.label_names), "class", "classes")
        return f"{classes}, partition {self.view.partition or 'of the file'}"

    def warning(self) -> str | None:
        """Where a partition by class deals sizes only."""
        recipe = read_name(self.view.partition or "")
        if recipe is None or deals_any(recipe.kind):
            return None
        return alike(self.file, self.view.taxonomy)

    def check(self) -> None:
        """Refuse a split without anything to learn, or to score, which would be an mIoU or an mAP of 0."""
        for name in dict.fromkeys(map(self.name_in_file, ("train", "val", *self.final_splits))):
            if not self.view.has_truth(name):
                raise ValueError(
                    f"{name} of {self.file.path} has no {self.view.truth} in {self.view.taxonomy}, so "
                    "nothing can be learnt or scored there: annotate some images, and make the file again"
                )

    def user_scores(
        self, split: str, columns: Sequence[Mapping[str, float]], label: str, directory: Path, title: str
    ) -> Tree:
        """Write ``per_user.json`` and ``plots/per_user.png``; the summaries for ``results.json``.

        Their mean weighs users alike and says another thing than the scores of the split. The first worker
        alone calls it.

        Args:
            split: whose users they are.
            columns: each user's scores in percent, NaN where one has none.
            label: what the first of `headline` is called in words.
            directory: of the run.
            title: of the picture.
        """
        from benchmarks.reporting import plots  # here, as matplotlib takes 0.3 s that most commands can spare

        store = self.split(split)
        values = {name: np.array([column[name] for column in columns]) for name in columns[0]}
        summary: Tree = {
            "split": split,
            "users": len(columns),
            "quantiles": {name: quantiles(found) for name, found in values.items()},
        }
        whole = {
            **summary,
            "user_ids": list(store.user_ids),
            "images": np.diff(store.user_offsets).tolist(),
            **{
                name: [None if np.isnan(v) else round(float(v), 4) for v in found]
                for name, found in values.items()
            },
        }
        write_json(directory / "per_user.json", whole)
        pairs = zip(store.user_ids, values[self.headline[0]].tolist())
        shown = {name: v for name, v in pairs if not np.isnan(v)}
        if 0 < len(shown) <= FEW_BARS:
            picture = directory / "plots" / "per_user.png"
            plots.bars(shown, f"{label} of a {split} user (%)", title, picture)
        groups = spreads_by_group(
            store.user_ids, trained_users(self, split), np.diff(store.user_offsets), values
        )
        return {"per_user": summary, "clients": groups}

    def rows(self, results: Tree) -> Mapping[str, Mapping[str, float]]:
        """Below the splits' scores, the means of those of single users: a row for each number of users that
        have a score."""
        means: dict[str, dict[str, float]] = {}
        users = results.get("per_user", {"quantiles": {}})
        for name, values in users["quantiles"].items():
            if values["n"]:
                means.setdefault(f"mean of {values['n']} {users['split']} users", {})[name] = values["mean"]
        return {**super().rows(results), **means}


def partition_facts(view: AnnotatedView) -> Tree:
    """How the training images lie with the users."""
    sizes = np.diff(view.split("train").user_offsets)
    return {
        "name": view.partition,
        "users": len(sizes),
        "images": int(sizes.sum()),
        **({"sizes": sizes.tolist()} if len(sizes) <= FEW_USERS else {}),
    }


@torch.no_grad()
def shown(view: AnnotatedView, model: PyTorchModel) -> tuple[Float32Array, Tensor, Tensor, list[str]]:
    """The first images of the first test users as the network sees them, for a picture, ``[n, S, S, 3]`` in
    0..1; their targets; the network's outputs; and their users."""
    store, module, device = view.split("test"), model.pytorch_model, get_default_device()
    rows = _shown_rows(store)
    images, targets = (torch.from_numpy(part).to(device) for part in store.read(rows))
    with autocast_of(model):
        outputs, truth = module.outputs(images, targets)
    pixels = module.task.pixels(images, None, module.framing).permute(0, 2, 3, 1)
    users = np.searchsorted(store.user_offsets, rows, side="right") - 1
    return pixels.cpu().numpy(), truth, outputs.float(), [store.user_ids[user] for user in users]


def _shown_rows(store: ImageStore) -> IntArray:
    users = min(OF_USERS, len(store.user_ids))
    starts, ends = store.user_offsets[:users], store.user_offsets[1 : users + 1]
    return np.concatenate([np.arange(a, min(a + SHOWN // users, b)) for a, b in zip(starts, ends)])
