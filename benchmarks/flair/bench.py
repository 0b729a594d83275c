"""How fast a round is, FLAIR's above all, by pfl's loop and the fast engine. See `benchmarks.bench.rounds`.

    python -m benchmarks.flair.bench [--output F] [--cases cpu|curves|gpu|all] [--rounds 3] [--only CASE]

Users have FLAIR's own histogram of sizes (the mini set at FLAIR's shape), two local epochs, batches of 16 and
the cap of 512 images, as in the paper. The cases of segmentation and detection are those of
`benchmarks.fedcv.bench`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.bench.rounds import STOCK, Sides, measure, report_cases
from benchmarks.core.config.trees import Tree
from benchmarks.core.features import Inputs, inputs_of
from benchmarks.fedcv import bench as fedcv
from benchmarks.flair.config import Run, parse
from benchmarks.flair.train import Flair
from dataset.cli import run as run_command
from dataset.flair.mini import MiniSpec, write_mini
from dataset.store.hdf5 import DataFile
from pfl_ext.privacy.accounting import PrivacyConfig

RESNET18_FLOPS = 3 * 2 * 1.82e9 / 224**2  # of a training pass, per pixel of the input


@dataclass(frozen=True)
class Case:
    """One measurement: what is trained."""

    name: str
    pixels: int
    labels: int = 17
    cohort: int = 20
    users: int = 2000
    val_users: int = 0
    """0: no evaluation; otherwise val is scored every tenth round, a tenth of which is charged to each."""
    precision: str = "fp32"
    """Precision of the fast engine; stock is always fp32, as pfl's users run it."""
    private: bool = False
    runtime: tuple[str, ...] = ()
    """Further words for the fast engine."""
    network: str = ""
    """Words for both: another network than ResNet-18 from scratch, fed with images as they are stored."""


HEAD = (
    "--model.arch efficientnet_lite0 --model.normalisation efficientnet_lite --model.pretrained true "
    "--model.trained head --augment.flip none"
)
CPU: list[Case | fedcv.Case] = [
    Case("32 px, 17 labels", 32, cohort=100),
    Case("32 px, 1,628 labels, with evaluation", 32, labels=1628, cohort=100, val_users=100),
    Case("32 px, private", 32, cohort=100, private=True),
    Case("64 px", 64, cohort=50),
    Case("64 px, bf16", 64, cohort=50, precision="bf16"),
    Case("224 px", 224, cohort=10, users=300),
    Case("224 px, bf16", 224, cohort=10, users=300, precision="bf16"),
    Case("128 px, head alone, cohort of 200", 128, cohort=200, users=1000, network=HEAD),
    *fedcv.CPU,
]
CURVES = [
    *(Case(f"cohort of {n}", 32, cohort=n) for n in (10, 100, 1000)),
    *(Case(f"{p} pixels", p, cohort=10, users=300) for p in (32, 64, 128, 224)),
    *(Case(f"{k} labels", 32, labels=k) for k in (17, 1628)),
]
FUSED = ("--runtime.fuse", "true")
on_card = partial(Case, pixels=224, cohort=200, users=400, precision="bf16")  # users: drawn in a minute
GPU = [
    on_card("224 px, cohort of 200, fp32", precision="fp32"),
    on_card("224 px, cohort of 200, bf16"),
    on_card("224 px, cohort of 200, bf16, with evaluation", val_users=200),
    on_card("224 px, cohort of 200, bf16, private", private=True),
    on_card("224 px, 1,628 labels, bf16", labels=1628),
    on_card("224 px, bf16, users of one step together", runtime=FUSED),
    *(on_card(f"224 px, bf16, {n} lanes", runtime=("--runtime.lanes", str(n))) for n in (1, 4, 16, 32)),
]
SETS: dict[str, Sequence[Case | fedcv.Case]] = {
    "cpu": CPU,
    "curves": CURVES,
    "gpu": GPU,
    "all": [*CPU, *CURVES, *GPU],
}


def _stored(case: Case) -> int:
    """Pixels of the images in the file, of which training of all layers sees crops."""
    return case.pixels if case.network else case.pixels + case.pixels // 8


def data_file(case: Case, folder: Path) -> Path:
    """The mini set with FLAIR's histogram at this size, drawn once."""
    path = folder / f"bench-{_stored(case)}-{case.users}-{max(case.val_users, 1)}.hdf5"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        spec = MiniSpec(case.users, max(case.val_users, 1), test_users=1, image_size=_stored(case))
        write_mini(path, spec)
    return path


@contextmanager
def compared(case: Case, folder: Path) -> Iterator[Sides]:
    """The two engines on one case, while its data file in ``folder`` is open."""
    words = ("--runtime.engine=fast", f"--runtime.precision={case.precision}", *case.runtime)
    common = (
        f"--config fl-r-{1628 if case.labels > 17 else 17} --data.image_size {_stored(case)} "
        f"--model.input_size {case.pixels} --federated.cohort_size {case.cohort} "
        f"--federated.weighting {'users' if case.private else 'images'} {case.network}"
    ).split()
    path = data_file(case, folder)
    with DataFile(path) as file:

        def opened(run: Run) -> Inputs:
            experiment = Flair(run, file)
            return inputs_of(experiment, experiment.module(), path)

        simulated = PrivacyConfig(2.0, clipping_bound=0.1, noise_cohort_size=5000, noise_population=41131)
        yield Sides(
            parse([*common, *STOCK, *(["--runtime.cache_features=false"] if case.network == HEAD else [])]),
            parse([*common, *words]),
            opened,
            "val" if case.val_users else None,
            simulated if case.private else None,
            RESNET18_FLOPS * case.pixels**2,
        )


def measured(case: Case | fedcv.Case, rounds: int, options: argparse.Namespace) -> Tree:
    """The numbers of both engines on one case."""
    if isinstance(case, fedcv.Case):
        return fedcv.measured(case, rounds, options)
    with compared(case, options.data_dir) as sides:
        return {"case": asdict(case), **measure(sides, rounds)}


def main(argv: Sequence[str]) -> None:
    """Measure and report."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data_dir", type=Path, default=Path("data"))

    report_cases(argv, "benchmarks.flair.bench", __doc__, SETS, measured, options)


if __name__ == "__main__":
    sys.exit(run_command(main))
