"""The rows, a run of one on a tiny file, what is kept of it, and the table with its exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.core.config.digests import experiment_digest
from benchmarks.core.config.trees import Tree
from benchmarks.published import rows, train, verify
from benchmarks.published.rows import names, read_row
from benchmarks.visual_classification.config import VISION, Config
from dataset.cifar10 import preprocess
from dataset.cli import run
from dataset.partitions.drawn import read_name
from tests.benchmarks.sparing import sparingly
from tests.dataset.cifar10.made_cifar import CIFAR10, write_parquet

HEAD = """# {name}: a row.
# Command:   make published ROW={name}
# Source:    {source}
# Published: {published}
# Scored:    {scored}
# Accepted:  {accepted}
# Time:      seconds
# Deviates:  in all,
#            as it is made up.
"""
BODY = """setting: {name}
recipe: niid-bench+fedavg
data:
  partition: iid-clients-3-seed-{{seed}}
local:
  num_epochs: 1
federated:
  num_rounds: 2
  cohort_size: 3
"""
MADE = {
    "source": "nobody",
    "published": "50.0 ± 2.5",
    "scored": "best round",
    "accepted": "40 to 60",
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Puts a row into a folder of its own; results and runs are kept beside it."""
    for module, name in ((rows, "CONFIGS"), (rows, "RESULTS"), (train, "RESULTS"), (train, "RUNS")):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    for name in ("configs", "results", "runs"):
        (tmp_path / name).mkdir()

    def call(name: str = "made", body: str = BODY, without: str = "", **values: str) -> Path:
        text = (HEAD + body).format(**{"name": name, **MADE, **values})
        path = tmp_path / "configs" / f"{name}.yaml"
        path.write_text(
            "".join(line for line in text.splitlines(True) if not line.startswith(f"# {without}:"))
        )
        return path

    return call


@pytest.mark.parametrize("name", names())
def test_every_row_says_what_was_published_and_can_be_run(name: str) -> None:
    row = read_row(name)
    assert row.name == name
    if row.band is None or row.published is None:
        assert row.band is None
        assert row.published is None
    else:
        low, high = row.band
        assert low < high
        if row.published > 10:  # that of a defect
            assert low < row.published < high
    config = VISION.parse(row.words(1)).config
    assert (config.setting, config.seed) == (name, 1)
    partition = config.data.partition
    assert partition is not None
    recipe = read_name(partition)
    assert recipe is not None, "drawn from any file of these images"
    assert recipe.seed == (1 if row.by_seed else 2020 if name.endswith("-nb2020") else 42)
    sizes = (config.federated.cohort_size, recipe.num_clients)
    assert sizes in ((10, 10), (10, 100), (50, 1000), (8192, 50_000))
    text = row.path.read_text()
    assert f"make published ROW={name} " in text


def test_rows_of_different_names_are_different_runs() -> None:
    configs = [VISION.parse(read_row(name).words(0)).config for name in names()]
    kept = {experiment_digest(vars_of(config), Config) for config in configs}
    assert len(kept) == len(configs)


def vars_of(config: Config) -> Tree:
    return {**asdict(config), "setting": ""}


def test_the_protocol_of_niid_bench() -> None:
    config = VISION.parse(read_row("niid-fedavg-dirichlet-fn").words(0)).config
    local, federated, model, augment = config.local, config.federated, config.model, config.augment
    assert (local.learning_rate, local.momentum, local.weight_decay) == (0.01, 0.9, 1e-5)
    assert (local.num_epochs, local.batch_size, local.reshuffle) == (10, 64, True)
    assert (local.straddle, local.max_images, local.max_grad_norm) == (False, None, None)
    assert (federated.num_rounds, federated.cohort_size, federated.weighting) == (50, 10, "images")
    assert (config.server.optimizer, config.server.learning_rate, config.server.momentum) == ("sgd", 1, 0)
    assert (model.arch, model.init, model.normalisation) == ("lenet", "torchvision", "none")
    assert (augment.crop, augment.padding, augment.flip) == ("padded", "reflect", "horizontal")
    assert (config.data.scored, config.evaluation.every_rounds) == ("test", 1)
    scaffold = VISION.parse(read_row("niid-scaffold-dirichlet-nb").words(2)).config
    assert (scaffold.federated.scaffold_option, scaffold.federated.scaffold_correction) == ("II", "step")
    assert scaffold.data.partition == "lda-legacy-0.5-clients-10-seed-2"
    for name, mu in (("niid-fedprox-dirichlet-fn", 0.01), ("niid-fedprox-dirichlet-nb", 0.001)):
        assert VISION.parse(read_row(name).words(0)).config.federated.mu == mu


def test_the_protocol_of_pfls_benchmark() -> None:
    config = VISION.parse(read_row("pfl-iid").words(0)).config
    local, federated, model = config.local, config.federated, config.model
    assert (local.learning_rate, local.momentum, local.weight_decay) == (0.1, 0, 0)
    assert (local.num_epochs, local.batch_size, local.shuffle, local.max_grad_norm) == (1, 10, False, None)
    assert (federated.num_rounds, federated.cohort_size) == (1500, 50)
    assert (federated.weighting, federated.replacement) == ("users", True)
    assert (config.server.optimizer, config.server.learning_rate, config.server.momentum) == ("sgd", 1, 0)
    assert (model.arch, model.init, model.dropout) == ("simple_cnn", "xavier", True)
    assert (config.augment.crop, config.augment.flip, model.normalisation) == ("crop", "none", "data")
    assert (config.data.dataset, config.evaluation.every_rounds) == ("cifar10_pfl", 10)
    private, true = (
        VISION.parse(read_row(name).words(0)).config.privacy
        for name in ("pfl-iid-private", "pfl-iid-private-true")
    )
    assert private is not None
    assert true is not None
    assert (private.epsilon, private.delta, private.clipping_bound) == (2, 1e-6, 0.4)
    assert (private.noise_cohort_size, private.noise_population) == (1000, 1_000_000)
    assert replace(private, noise_cohort_size=None, noise_population=None) == true


def test_the_protocol_of_private_features() -> None:
    config = VISION.parse(read_row("scatternet-linear").words(0)).config
    local, federated, model, server = config.local, config.federated, config.model, config.server
    assert (local.learning_rate, local.num_epochs, local.batch_size, local.max_grad_norm) == (1, 1, 1, None)
    assert (local.momentum, local.weight_decay) == (0, 0)
    assert (server.optimizer, server.learning_rate, server.momentum) == ("sgd", 4, 0.9)
    assert federated.num_rounds == 60 * (50_000 // 8192), "the source drops the last batch of an epoch"
    assert (model.arch, model.init, model.channel_norm) == ("scatternet", "torchvision", "data")
    assert (model.trained, model.normalisation, config.augment.flip) == ("head", "imagenet", "none")
    privacy = config.privacy
    assert privacy is not None
    assert (privacy.sampler, privacy.mechanism, privacy.clipping_bound) == ("poisson", "gaussian", 0.1)
    calibration = privacy.calibrate(50_000, federated.cohort_size, federated.num_rounds)
    assert calibration.simulated.noise_multiplier == 5.67
    assert calibration.simulated.releases == (8, 8)
    assert round(calibration.epsilon, 2) == 2.38, "where the source says 3"
    assert round(calibration.epsilon_rdp, 2) == 2.59
    assert not calibration.is_simulation


@pytest.mark.parametrize(
    "values, message",
    [
        ({"published": "none"}, "both as 'none' where the source has no number"),
        ({"accepted": "none"}, "both as 'none' where the source has no number"),
        ({"without": "Accepted"}, "its opening comment has no line '# Accepted: ...'"),
        ({"without": "made"}, "its opening comment has no line '# made: ...'"),
        ({"published": "about 50"}, "write Published as"),
        ({"accepted": "50"}, "Accepted as '60.5 to 64.5'"),
        ({"scored": "any round"}, "Scored as best round or last round or last 10 rounds or own images"),
    ],
)
def test_a_row_that_is_not_written_as_one_is_refused(write: Write, values: Any, message: str) -> None:
    path = write(**values)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        read_row("made")


def made_data(folder: Path) -> Path:
    """CIFAR-10's layout with a few made images."""
    write_parquet(CIFAR10, folder / "in")
    data = folder / "cifar.hdf5"
    words = ["--output_file", str(data), "--source", str(folder / "in"), "--splits", "none"]
    assert run(lambda argv: preprocess.main(CIFAR10, argv), words) == 0
    return data


def test_a_row_is_run_kept_and_shown_once(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    data = made_data(tmp_path)
    argv = ["--row", "made", "--seed=4", "--data_path", str(data), "--runtime.progress=false"]
    with sparingly(False):
        assert run(train.main, argv) == 0
    kept = tmp_path / "results" / "made-seed4.json"
    first = kept.read_bytes()
    result = json.loads(first)
    directory = tmp_path / "runs" / "made-seed4"
    lines = [json.loads(line)["tracked"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert result["curve"] == [line["accuracy"] for line in lines[1:]], (
        "after each round, not before the first"
    )
    assert (result["last"], result["best"]) == (result["curve"][-1], max(result["curve"]))
    assert result["curve"][result["best_round"] - 1] == result["best"]
    assert result["partition"]["sizes"] == [20, 20, 20]
    assert result["partition"]["name"] == "iid-clients-3-seed-4"
    assert result["command"] == f"python -m benchmarks.published.train {' '.join(argv)}"
    assert json.loads((directory / "results.json").read_text())["input"]["std"] == [1, 1, 1]
    with sparingly(False):
        assert run(train.main, argv) == 0
    assert kept.read_bytes() == first
    assert "has already finished" in capsys.readouterr().out
    write("scrambled", body=BODY.replace("data:", "data:\n  dataset: cifar10_pfl"))
    assert run(train.main, ["--row", "scrambled", *argv[2:]]) == 2
    said = "but this row needs a file made by python -m dataset.cifar10_pfl"
    assert said in capsys.readouterr().err


def test_the_protocol_of_fedrep() -> None:
    own, shared = (
        VISION.parse(read_row(name).words(3)).config for name in ("fedrep-shards2", "fedrep-fedavg-shards2")
    )
    for config in (own, shared):
        local, federated, model, augment = config.local, config.federated, config.model, config.augment
        assert (local.learning_rate, local.momentum, local.weight_decay) == (0.01, 0.5, 1e-4)
        assert (local.num_epochs, local.batch_size, local.reshuffle) == (1, 10, True)
        assert (local.straddle, local.max_images, local.max_grad_norm) == (False, None, None)
        assert (federated.num_rounds, federated.cohort_size, federated.weighting) == (100, 10, "users")
        assert (config.server.optimizer, config.server.learning_rate, config.server.momentum) == ("sgd", 1, 0)
        assert (model.arch, model.init, model.normalisation) == ("fedrep_cnn", "torchvision", "imagenet")
        assert (augment.crop, augment.padding, augment.flip) == ("padded", "zero", "horizontal")
        assert config.data.partition == "shards-2-clients-100-seed-3"
    options = own.federated.options or {}
    assert (options["personal"], options["personal_epochs"], options["tune_epochs"]) == ("head", 10, 10)
    assert own.federated.algorithm == "fedrep"
    assert shared.evaluation.every_rounds == 1


def test_users_own_models_and_the_last_rounds_are_kept_and_compared(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = BODY.replace("cohort_size: 3", "cohort_size: 3\n  algorithm: fedrep\n  options: {{held_out: 0.5}}")
    write(body=body, scored="own images", accepted="0 to 100")
    with sparingly():
        train.main(["--row", "made", "--data_path", str(made_data(tmp_path))])
    kept = json.loads((tmp_path / "results" / "made-seed0.json").read_text())
    results = json.loads((tmp_path / "runs" / "made-seed0" / "results.json").read_text())
    assert kept["own"] == results["clients"]["seen"]["personal"]["pooled"]["accuracy"]
    assert kept["last_10"] == sum(kept["curve"]) / 2
    put(tmp_path / "results", 1, own=60.0, last_10=20.0, best=1.0, last=2.0)
    capsys.readouterr()
    for scored, ours in (
        ("own images", (kept["own"] + 60) / 2),
        ("last 10 rounds", (kept["last_10"] + 20) / 2),
    ):
        write(body=body, scored=scored, accepted="0 to 100")
        assert run(verify.main, []) == 0
        assert f"| {scored} | 50 ± 2.5 | 0 to 100 | {ours:.2f} ± " in capsys.readouterr().out


def test_the_last_10_rounds_are_the_last_ones_that_were_scored(tmp_path: Path) -> None:
    lines = ({"round": number, "tracked": {"accuracy": 2.0 * number}} for number in range(16))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "results.json").write_text('{"commit": "c"}')
    kept = train.result_of(read_row("fedrep-fedavg-shards2"), 0, tmp_path, [])
    assert (kept["last_10"], kept["last"]) == (2 * sum(range(6, 16)) / 10, 30)


def test_a_run_that_diverges_is_kept_until_then(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(body=BODY.replace("num_epochs: 1", "num_epochs: 1\n  learning_rate: 1e20"), scored="last round")
    data = made_data(tmp_path)
    with sparingly(False):
        assert run(train.main, ["--row", "made", "--seed=4", "--data_path", str(data)]) == 2
    assert "the model has diverged" in capsys.readouterr().err
    kept = json.loads((tmp_path / "results" / "made-seed4.json").read_text())
    assert kept["diverged_in_round"] == 0
    assert kept["last"] == kept["curve"][-1]
    with pytest.raises(SystemExit):
        run(verify.main, [])
    assert "| 1 (seed 4 diverged in round 0) |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "give --row, one of made"),
        (["--row", "other"], "there is no published row 'other': choose one of made"),
        (["--row=made", "--seed=x"], "--seed is 'x': give a whole number from 0 on"),
        (["--row=made", "--local.num_epochs=2"], "--local.num_epochs=2 would change the row: only --row"),
        (["--row=made", "--run_dir=x"], "--run_dir=x would change the row: only --row, --seed, --data_path"),
        (["--row=made"], "a published row always needs its own data; give --data_path FILE"),
        (["--row=made", "--data_path=missing"], "--data_path missing: no such file"),
        (
            ["--row=made", "--data_path=mini"],
            "--data_path mini: no such file: a published row always needs its own data",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    argv: list[str],
    message: str,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write()
    monkeypatch.chdir(tmp_path)
    assert run(train.main, argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list((tmp_path / "runs").iterdir())


def put(folder: Path, seed: int, /, **scores: object) -> Path:
    path = folder / f"made-seed{seed}.json"
    path.write_text(json.dumps({"row": "made", "seed": seed, **scores}))
    return path


def test_the_table_has_our_mean_its_distance_and_the_verdict(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    write("made-again", scored="last round", published="10")
    under_way = tmp_path / "runs" / "made-again-seed1"
    under_way.mkdir()
    (under_way / "metrics.jsonl").write_text("{}\n" * 17)
    put(tmp_path / "results", 0, best=50.0, last=10.0)
    put(tmp_path / "results", 2, best=60.0, last=20.0)
    assert run(verify.main, []) == 0
    made, again = capsys.readouterr().out.splitlines()[2:]
    cells = ["made", "best round", "50 ± 2.5", "40 to 60", "55.00 ± 7.07", "2", "+5.00 = +2.0 sd", "within"]
    assert made == f"| {' | '.join(cells)} |"
    cells = [
        "made-again",
        "last round",
        "10",
        "40 to 60",
        "–",
        "0 (seed 1 has done 17 rounds)",
        "–",
        "no run",
    ]
    assert again == f"| {' | '.join(cells)} |"
    write(published="none", accepted="none")
    assert run(verify.main, ["made"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[2:]
    cells = ["made", "best round", "–", "–", "55.00 ± 7.07", "2", "–", "nothing published"]
    assert line == f"| {' | '.join(cells)} |"


def test_a_finished_row_outside_its_band_ends_in_exit_code_1(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    put(tmp_path / "results", 0, best=39.9, last=50.0)
    with pytest.raises(SystemExit) as ended:
        run(verify.main, ["made"])
    assert ended.value.code == 1
    assert "outside the band: made" in capsys.readouterr().err


@pytest.mark.parametrize(
    "scores, message",
    [
        ({"last": 1}, "is not a result of a published row"),
        ({"best": "x"}, "is not a result of a published row"),
        ({"best": 101}, "is the result of another run: make it again"),
        ({"best": 50, "row": "other"}, "is the result of another run: make it again"),
        ({"best": 50, "seed": 1}, "is the result of another run: make it again"),
    ],
)
def test_a_damaged_result_is_bad_input(
    scores: Any, message: str, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    path = put(tmp_path / "results", 0, **scores)
    assert run(verify.main, []) == 2
    assert f"error: {path} {message}" in capsys.readouterr().err
    assert run(verify.main, ["nothing"]) == 2
