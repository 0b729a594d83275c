"""Bad calls of every command line that trains or measures: exit code 2, one line that is last, nothing left.

Each row is refused before anything is written, so that nothing hinders the corrected command, which is run at
the end in the same directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench import cpu_kernels, engine_parts
from benchmarks.core import show_weights
from benchmarks.core.config import privacy_matrix
from benchmarks.flair import bench as flair_bench
from benchmarks.flair import bench_preprocess, bench_workers, per_user, standin, table1
from benchmarks.flair import train as flair
from benchmarks.published import train as published
from benchmarks.published import verify as published_verify
from benchmarks.sweep import command as sweep
from benchmarks.visual_classification import bench as vision_bench
from benchmarks.visual_classification import train as vision
from dataset.cli import run
from dataset.flair.mini import write_mini
from tests.bad_calls import check_refused
from tests.benchmarks.conftest import TINY
from tests.launching import run as launch
from tests.launching import warmly

MAIN: dict[str, Callable[[Sequence[str]], None]] = {
    "flair": flair.main,
    "vision": vision.main,
    "table1": table1.main,
    "sweep": sweep.main,
    "per_user": per_user.main,
    "standin": standin.main,
    "flair_bench": flair_bench.main,
    "vision_bench": vision_bench.main,
    "cpu_kernels": cpu_kernels.main,
    "engine_parts": engine_parts.main,
    "bench_workers": bench_workers.main,
    "bench_preprocess": bench_preprocess.main,
    "privacy_matrix": privacy_matrix.main,
    "show_weights": show_weights.main,
    "published": published.main,
    "published_verify": published_verify.main,
}
SMALL = "--run_dir=run --data.image_size=20 --model.input_size=16 --model.arch=lenet"
FLAIR = f"--data_path=good.hdf5 {SMALL} --federated.cohort_size=4 --federated.num_rounds=1"
CENTRAL = f"--config=c-r-17 --data_path=good.hdf5 {SMALL} --centralised.num_epochs=1"
PRIVATE = f"--config=pfl-r-17 {FLAIR} --privacy.noise_cohort_size=none --privacy.delta=0.01"
VISION = f"--data_path=classes.hdf5 {SMALL} --federated.cohort_size=4 --federated.num_rounds=1"
FEDPROX = "--federated.algorithm=fedprox --federated.options.mu=0.1"
FINE = "--config=fl-f-17 --data_path=good.hdf5 --run_dir=run"

BAD = [
    ("published", "", "give --row, one of fedrep-"),
    ("published", "--row=niid --seed=0", "there is no published row 'niid': choose one of fedrep-"),
    ("published", "stray", "stray would change the row: only --row, --seed, --data_path and"),
    ("published", "--row=niid-fedavg-dirichlet-fn", "a published row always needs its own data; give"),
    ("published_verify", "stray", "there is no published row 'stray': choose one of fedrep-"),
    ("flair", "stray", "cannot read the argument 'stray'"),
    ("flair", f"{FLAIR} --seed", "--seed needs a value"),
    ("flair", f"{FLAIR} --seed=-1", "seed is '-1'"),
    ("flair", f"{FLAIR} --bogus=1", "there is no config key bogus"),
    ("flair", f"{FLAIR} --local.learnin_rate=1", "did you mean local.learning_rate?"),
    ("flair", f"{FLAIR} --local.learning_rate=fast", "local.learning_rate is 'fast'"),
    ("flair", f"{FLAIR} --local.batch_size=0", "local.batch_size is '0'"),
    ("flair", f"{FLAIR} --local=3", "local is '3'"),
    ("flair", f"{FLAIR} --config=fl-r-71", "--config fl-r-71: no such file, and not the name of a config"),
    (
        "flair",
        f"{FLAIR} --config=ditto",
        "and not the name of a config of this project; the names are c-f-1628, ",
    ),
    (
        "vision",
        "--config=scaffold",
        "(there is a recipe of this name: give --recipe scaffold in addition to a config)",
    ),
    ("flair", f"{FLAIR} {FEDPROX}", "fedprox, which has none under federated.options: set federated.mu"),
    ("flair", f"{FLAIR} --config=", "--config is empty"),
    ("flair", f"{FLAIR} --config=text", "text must hold a mapping"),
    ("flair", f"{FLAIR} --config=idle.yaml", "idle.yaml: federated.mu has no effect"),
    ("flair", f"{FLAIR} --config=scale.yaml", "scale is ['mini']: choose one of head, mini, small, tiny"),
    ("flair", f"{FLAIR} --config=runtime.yaml", "command line: runtime is 3, but has keys of its own: give"),
    ("flair", f"{FLAIR} --config=nothing.yaml", "command line: runtime is None, but has keys of its own: "),
    ("flair", f"{FLAIR} --recipe=pfll", "recipe is 'pfll'"),
    ("flair", f"{FLAIR} --scale=huge", "scale is 'huge'"),
    ("flair", f"{FLAIR} --resume=maybe", "--resume is 'maybe'"),
    ("flair", f"{FLAIR} --data_path=nowhere.hdf5", "nowhere.hdf5"),
    ("flair", f"{FLAIR} --data_path=text", "text is not an HDF5 file"),
    ("flair", f"{FLAIR} --run_dir=text", "--run_dir text is a file"),
    ("flair", f"{FLAIR} --run_dir=text/below", "text/below"),
    ("flair", f"{FLAIR} --run_dir=/proc/run", "/proc/run"),
    ("flair", f"{FLAIR} --run_dir=run\udce9", "--run_dir run\ufffd has letters that are not UTF-8"),
    ("flair", f"{FLAIR} --run_dir=gone", "--run_dir gone: the target of the link gone does not exist"),
    ("flair", f"{FLAIR} --run_dir=loop/below", "--run_dir loop/below: the target of the link loop does not"),
    (
        "flair",
        f"{FLAIR} --model.arch=resnet19",
        "model.arch is 'resnet19', which is not a known network; did you mean",
    ),
    ("flair", f"{FLAIR} --model.input_size=99", "model.input_size is 99, but must be at most"),
    ("flair", f"{FLAIR} --federated.cohort_size=13", "12, for example --federated.cohort_size 12"),
    ("flair", f"{FLAIR} --federated.mu=0.1", "has no effect where federated.algorithm is fedavg"),
    ("flair", f"{FLAIR} --centralised.num_epochs=3", "has no effect where mode is federated"),
    ("flair", f"{FLAIR} --personal.learning_rate=1", "has no effect where personal.num_epochs is 0"),
    ("flair", f"{FLAIR} --personal.num_epochs=1 --personal.min_images=999", "lower personal.min_images"),
    ("flair", f"{FLAIR} --local.virtual_size=4", "set federated.weighting to users"),
    ("flair", f"{FLAIR} --data.binary_label=unicorn", "'unicorn' is in neither taxonomy"),
    ("flair", f"{FLAIR} --evaluation.best_by=accuracy", "choose loss, C-AP or last"),
    ("flair", f"{FLAIR} --runtime.device=quantum", "runtime.device is 'quantum'"),
    ("flair", f"{FLAIR} --runtime.project=mine", "has no effect where runtime.track is none"),
    ("flair", f"{FLAIR} --runtime.checkpoint_minutes=0", "checkpoint_minutes is '0'"),
    ("flair", f"{FLAIR} --weights=weights.pth", "--weights can be used only if pretrained weights are"),
    ("flair", f"{FINE} --weights=nowhere.pth", "--weights nowhere.pth: no such file"),
    ("flair", "--data_path=nowhere.hdf5", "or from your own images with python -m dataset.convert"),
    ("flair", f"{FINE} --weights=text", "text"),
    ("flair", f"{FINE} --model.arch=efficientnet_lite0", "another input: set it to efficientnet_lite"),
    ("flair", f"{CENTRAL} --federated.num_rounds=3", "has no effect where mode is centralised"),
    ("flair", f"{CENTRAL} --data.partition=iid", "has no effect where mode is centralised"),
    ("flair", f"{PRIVATE} --federated.algorithm=fednova", "privacy refuses federated.algorithm"),
    ("flair", f"{PRIVATE} --privacy.noise_population=3", "privacy.noise_population is 3"),
    ("flair", f"{PRIVATE} --privacy.epsilon=-1", "epsilon"),
    ("vision", f"{VISION} --personal.num_epochs=3", "there is no config key personal"),
    ("vision", f"{VISION} --evaluation.per_user=true", "there is no config key evaluation.per_user"),
    ("vision", f"{VISION} --data.partition=alpha-9", "alpha-9"),
    ("vision", f"{VISION} --data.taxonomy=colours", "colours"),
    ("vision", f"{VISION} --data.scored=train", "data.scored"),
    ("vision", f"{VISION} --evaluation.best_by=C-AP", "should be 'loss', 'accuracy', 'C-accuracy', 'macro"),
    ("vision", f"{VISION} --model.trained=two_layers", "set model.bottleneck"),
    ("vision", f"{VISION} --recipe=fedavgm+no", "recipe is 'fedavgm+no'"),
    ("vision", f"{VISION} --data_path=nowhere.hdf5", "nowhere.hdf5"),
    ("table1", "--settings fl-r-71", "no such file, and not the name of a config"),
    ("table1", "--scale huge", "scale is 'huge'"),
    ("table1", "--seeds one", "invalid int value: 'one'"),
    ("table1", "--data_path=good.hdf5 --runs_dir=runs --weights=nowhere.pth", "nowhere.pth: no such file"),
    ("table1", "--data_path=good.hdf5 --runs_dir=runs -- --local.learnin_rate=1", "did you mean"),
    ("sweep", "--local true", "give the sweep first: python -m benchmarks.sweep NAME_OR_YAML"),
    ("sweep", "no-such-sweep --local true", "no-such-sweep"),
    ("sweep", "learning-rates --local maybe", "local is 'maybe'"),
    ("sweep", "learning-rates --local true --workers 0 --data_path=good.hdf5", "--workers is '0'"),
    ("sweep", "learning-rates --program benchmarks.no.train", "--program is 'benchmarks.no.train': choose"),
    ("sweep", "learning-rates --program benchmarks.core.train", "is 'benchmarks.core.train': choose"),
    ("per_user", "nowhere", "nowhere is not a folder"),
    ("per_user", "folder", "folder has no run"),
    ("per_user", "folder --local.learning_rate=1", "only personal.*, runtime.* and data_path"),
    ("standin", "", "required: --output_file"),
    ("standin", "--output_file=w.safetensors --method=magic", "invalid choice: 'magic'"),
    ("flair_bench", "--cases nope", "--cases: invalid choice: 'nope'"),
    ("flair_bench", "--rounds 0", "--rounds is 0"),
    ("flair_bench", "--only none-such", "--only 'none-such' is in no case's name"),
    ("flair_bench", "--output=folder", "--output folder is a folder"),
    ("vision_bench", "--cases nope", "--cases: invalid choice: 'nope'"),
    ("vision_bench", "--colour=red", "unrecognized arguments: --colour=red"),
    ("cpu_kernels", "--pixels 16", "at least 32"),
    ("cpu_kernels", "--repeats x", "--repeats: invalid int value: 'x'"),
    ("engine_parts", "--pixels 16", "at least 32"),
    ("bench_workers", "", "required: what"),
    ("bench_workers", "nope", "invalid choice: 'nope'"),
    ("bench_preprocess", "", "required: --output"),
    ("privacy_matrix", "extra", "'extra'"),
    ("show_weights", "extra", "unrecognized arguments: extra"),
]
"""Command, its arguments, and what the line says."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of a dozen users, and files that are none."""
    folder = tmp_path_factory.mktemp("calls")
    write_mini(folder / "good.hdf5", TINY)
    write_mini(folder / "classes.hdf5", replace(TINY, coarse_labels=1))
    (folder / "text").write_text("- neither this nor that\n")
    (folder / "weights.pth").write_bytes(b"weights")
    (folder / "idle.yaml").write_text("federated:\n  mu: 0.1\n")
    (folder / "scale.yaml").write_text("scale: [mini]\n")
    (folder / "runtime.yaml").write_text("runtime: 3\n")
    (folder / "nothing.yaml").write_text("runtime:\n")
    (folder / "folder").mkdir()
    (folder / "gone").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.mark.parametrize(("command", "words", "said"), BAD)
def test_a_bad_call_is_one_line_and_leaves_nothing(
    place: Path,
    command: str,
    words: str,
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    check_refused(MAIN[command], words, said, place, capfd)


def test_the_corrected_calls_work_where_the_bad_ones_were_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert run(flair.main, [*FLAIR.split(), "--runtime.progress=false"]) == 0
    assert (place / "run" / "results.json").is_file()


@pytest.mark.parametrize("words", ["--model.arch=resnet19", "--local.batch_sise=3"])
def test_the_line_is_the_last_where_screen_and_errors_go_to_one_place(place: Path, words: str) -> None:
    command = warmly("benchmarks.flair.train", f"--data_path={place / 'good.hdf5'}", words)
    command += [f"--run_dir={place / 'other'}", "--model.input_size=16", "--data.image_size=20"]
    assert launch(command, code=2).splitlines()[-1].startswith("error: ")
    assert not (place / "other").exists()
