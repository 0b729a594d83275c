"""Federated visual classification: settings are the paper's rows, curves are read as the paper does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.core.config.digests import config_tree, digest
from benchmarks.core.config.trees import Tree
from benchmarks.visual_classification import paper, report
from benchmarks.visual_classification.config import RECIPES, VISION, parse
from benchmarks.visual_classification.curves import read_curve, read_finished
from benchmarks.visual_classification.results import show
from benchmarks.visual_classification.train import VisualClassification
from dataset.cli import run as run_command


@pytest.mark.parametrize("name", VISION.settings)
def test_every_shipped_setting_is_built_and_opens_with_what_it_is(name: str) -> None:
    head = VISION.path(name).read_text().split("\nsetting:")[0]
    for word in ("# Command:", "# Expected:", "# Time:", "# Deviates:"):
        assert word in head
    assert parse(["--config", name]).config.setting == name


def test_every_row_of_the_papers_tables_has_a_setting_and_no_other() -> None:
    assert sorted(paper.rows()) == list(VISION.settings)
    counts = {n: sum(n in row["table"] for row in paper.rows().values()) for n in (2, 3, 4, 5)}
    assert counts == {2: 8, 3: 8, 4: 24, 5: 8}


@pytest.mark.parametrize("name", [n for n in VISION.settings if "centralised" not in n])
def test_a_setting_is_the_method_of_its_name(name: str) -> None:
    config = parse(["--config", name]).config
    row, words = paper.rows()[name], name.split("-")
    assert config.federated.cohort_size == row["cohort_size"]
    assert config.server.optimizer == "sgd"
    assert config.server.learning_rate == 1.0
    assert config.server.momentum == (0.9 if "fedavgm" in words else 0.0)
    assert config.local.virtual_size == (256 if "vc" in words else None)
    assert config.federated.sampling == ("proportional" if "vc" in words else "uniform")
    assert config.federated.weighting == ("users" if "vc" in words else "images")
    assert config.federated.reweight == ("fedir" if "ir" in words else "none")
    assert config.model.trained == ("two_layers" if "2l" in words else "all")
    assert config.local.learning_rate == 0.01
    landmarks = words[0] == "landmarks"
    assert (config.local.batch_size, config.local.num_epochs) == ((32, 5) if landmarks else (64, 1))
    assert config.local.weight_decay == (4e-4 if words[0].startswith("cifar") else 4e-5)
    assert config.model.input_size == {"inat": 299, "landmarks": 224}.get(words[0], 32)
    assert config.model.pretrained == (words[0] in ("inat", "landmarks") and "scratch" not in words)


def test_the_papers_numbers_of_one_setting_in_two_tables_agree() -> None:
    row = paper.rows()["inat-user-120k-fedavgm-vc-k10"]
    assert row["table"] == [2, 3]
    assert row["accuracy_at_round"] == {"1000": 37.9, "2500": 43.7, "5000": 49.1}
    assert paper.centralised("inat-user-120k-fedavgm-vc-k10") == 57.9
    assert paper.centralised("landmarks-2l-fedavg-k10") == 40.27


def test_recipes_are_joined_and_the_later_one_wins() -> None:
    config = parse(["--config=cifar10-fedavg", "--recipe=fedavgm+vc+ir"]).config
    assert (config.server.momentum, config.local.virtual_size) == (0.9, 256)
    assert config.federated.reweight == "fedir"
    with pytest.raises(ValueError, match="recipe is 'fedavgm\\+no': choose one of"):
        parse(["--recipe=fedavgm+no"])
    assert {"cifar10", "vc", "ir", "fedprox", "fednova"} <= RECIPES.keys()


def test_a_users_images_count_once() -> None:
    with pytest.raises(ValueError, match="would count twice: set federated\\.weighting to users"):
        parse(["--config=cifar10-fedavg", "--federated.sampling=proportional"])
    parse(["--config=cifar10-fedavg", "--federated.sampling=proportional", "--federated.weighting=users"])
    parse(["--config=cifar10-fedavg", "--federated.sampling=proportional", "--federated.algorithm=split"])


@pytest.mark.parametrize("word", ["--federated.algorithm=dsgd", "--aggregation.kind=median"])
def test_virtual_clients_go_with_what_reads_no_weighting(word: str) -> None:
    """Before, it was refused with advice to set weighting to users, which is refused as without effect."""
    words = ["--config=cifar10-fedavg", "--local.virtual_size=32", word]
    assert parse(words).config.local.virtual_size == 32
    with pytest.raises(ValueError, match=r"--federated.weighting has no effect where"):
        parse([*words, "--federated.weighting=users"])


def test_the_effective_rate_is_the_clients_over_one_minus_momentum() -> None:

    words = ["--config=cifar10-fedavgm", "--local.effective_learning_rate=0.1"]
    assert parse(words).config.local_learning_rate == pytest.approx(0.01)
    assert parse([*words, "--server.momentum=0.99"]).config.local_learning_rate == pytest.approx(0.001)
    assert parse(words[:1]).config.local_learning_rate == 0.01


@pytest.mark.parametrize(
    "words, message",
    [
        (["--local.virtual_size=32"], "set federated.weighting to users"),
        (["--model.trained=two_layers"], "set model.bottleneck"),
        (["--data_path=/no/such.hdf5"], "no such file"),
    ],
)
def test_what_no_run_could_mean_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisualClassification.resolve_data(words)


def lines(*scored: tuple[int, float], steps: int = 3, num_rounds: int = 10) -> list[Tree]:
    """``metrics.jsonl``: each round's slowest user makes ``steps + round`` steps."""
    accuracies = dict(scored)
    out: list[Tree] = [{"round": t, "max_local_steps": steps + t} for t in range(num_rounds)]
    out.append({"round": num_rounds})
    for line in out:
        if line["round"] in accuracies:
            line["tracked"] = {"loss": 1.0, "accuracy": accuracies[line["round"]]}
    return out


def test_accuracy_is_read_off_at_rounds_and_at_batches() -> None:
    curve = read_curve(lines((0, 10.0), (4, 20.0), (8, 40.0), (10, 30.0)))
    assert curve.batches.tolist() == [0, 3 + 4 + 5 + 6, sum(range(3, 11)), sum(range(3, 13))]
    assert [curve.at_round(n) for n in (0, 3, 4, 9, 10, 11)] == [10, 10, 20, 40, 30, None]
    assert [curve.at_batch(n) for n in (17, 18, 75, 76)] == [10, 20, 30, None]
    assert [curve.rounds_to(x) for x in (5, 15, 40, 41)] == [0, 4, 8, None]
    assert curve.best == 40
    text = json.dumps(lines((0, 10.0), (4, 20.0), (8, 40.0), (10, 30.0)))
    older = read_curve(json.loads(text.replace('"tracked"', '"val"')))
    assert older.accuracy.tolist() == curve.accuracy.tolist()


def made_run(folder: Path, setting: str, seed: int, best: float, *argv: str) -> None:
    """A run directory as training on the paper's data leaves it."""
    folder.mkdir(parents=True)
    config = parse([f"--config={setting}", f"--seed={seed}", *argv]).config
    (folder / "config.yaml").write_text(yaml.safe_dump(config_tree(config)))
    metrics = lines((0, 10.0), (5, best), (10, best - 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    results = {
        "setting": setting, "seed": seed, "rounds": 10, "test": {"accuracy": best - 1},
        "last": {"test": {"accuracy": best - 1}}, "data_sha256": "d", "hardware": "two cores",
        "commit": "c" * 40, "config_sha256": digest(config), "partition": {"mean_emd": 1.7 if argv else 0.3},
        "per_class_accuracy": dict.fromkeys("abcdefghij", 1.0),
        "data": {"images": paper.IMAGES[config.data.dataset]},
        "weights": {"sha256": "ab", "torchvision": True} if config.model.pretrained else None,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))


def test_a_report_has_the_seeds_together_and_the_papers_row_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, best in enumerate((40.0, 44.0)):
        made_run(tmp_path / f"a{seed}", "inat-geo-3k-fedavgm-k10", seed, best)
        made_run(
            tmp_path / f"b{seed}", "inat-geo-3k-fedavgm-k10", seed, best - 20, "--data.partition=alpha-0.10"
        )
    made_run(tmp_path / "c", "inat-centralised", 0, 85.0)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.yaml").write_text("setting: x\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text('{"test": ')
    words = [str(tmp_path), f"--output_dir={tmp_path / 'out'}", "--rounds=5,10", "--batches=50"]
    assert run_command(report.main, words) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert capsys.readouterr().out.startswith(text)
    (row,) = [line for line in text.splitlines() if "| geo-3k | 0, 1 |" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    spread = np.std([40, 44], ddof=1)
    assert cells[4:9] == [
        f"42.0 ± {spread:.1f}",
        f"41.0 ± {spread:.1f}",
        f"42.0 ± {spread:.1f}",
        cells[7],
        cells[8],
    ]
    assert cells[7] == f"41.0 ± {spread:.1f}"
    assert cells[9] == f"50.0 ± {100 / 84 * spread:.1f}", "relative to the centralised run's last, 84"
    assert text.count("| inat-geo-3k-fedavgm-k10, the paper's |") == 1, "not under the other partition"
    assert "* inat-geo-3k-fedavgm-k10, alpha-0.10: config differs: data.partition=alpha-0.10" in text
    assert "half is not a complete run (it has not finished)" in text
    assert "broken is not a complete run (config.yaml is missing" in text
    assert (tmp_path / "out" / "report.csv").read_text().count("\n") == 4
    for name in ("learning-curves-rounds", "learning-curves-batches", "relative-accuracy-emd"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_equal_seeds_and_several_centralised_experiments_are_named_not_averaged(tmp_path: Path) -> None:
    """Issue 17.37."""
    made_run(tmp_path / "a", "cifar10-fedavg", 0, 40.0)
    made_run(tmp_path / "again", "cifar10-fedavg", 0, 44.0)
    made_run(tmp_path / "c", "cifar10-centralised", 0, 80.0)
    made_run(tmp_path / "other", "inat-centralised", 0, 60.0)
    words = [str(tmp_path), f"--output_dir={tmp_path / 'out'}", "--rounds=10", "--batches=50"]
    assert run_command(report.main, words) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| cifar10-fedavg |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == "0"
    assert cells[4] == "39.0"
    assert f"{tmp_path / 'again'} repeats {tmp_path / 'a'}" in text
    assert "test accuracy 43.00, where 39.00 IS COUNTED" in text
    assert "several experiments of it" in text
    assert "50.0" not in row


@pytest.mark.parametrize(
    "argv, changes, reason",
    [
        ((), {}, None),
        (("--scale=mini",), {}, "config differs: "),
        (("--centralised.learning_rate=0.1",), {}, "config differs: centralised.learning_rate=0.1"),
        ((), {"data": {"images": {"train": 3}}}, "the data are not the paper's inaturalist"),
        ((), {"weights": {"imagenet": False}}, "weights are not torchvision's ImageNet ones"),
        ((), {"setting": "mine"}, "the paper has no row mine"),
    ],
)
def test_the_papers_row_stands_only_beside_what_can_be_compared_with_it(
    argv: tuple[str, ...], changes: Tree, reason: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.41."""
    config = parse(["--config=inat-centralised", *argv]).config
    scores = {"accuracy": 50.0}
    results = {
        "setting": "inat-centralised", "data": {"images": paper.IMAGES["inaturalist"]}, "rounds": 3,
        "best_step": 3, "weights": {"imagenet": True}, "test": scores, "last": {"test": scores},
        "partition": {"name": None, "users": 3, "images": 9, "mean_emd": 0.5},
        "per_class_accuracy": {"a": 50.0}, **changes,
    }  # fmt: skip
    reasons = paper.reasons_against(asdict(config), results)
    assert any(text.startswith(reason) for text in reasons) if reason else reasons == ()
    show(config, results)
    shown = capsys.readouterr().out
    assert ("the paper's: 57.9 %" in shown) == (reason is None)


@pytest.mark.parametrize(
    "name, note",
    [
        ("alpha-0.30", "alpha 0.3 is the total over the 10 classes"),
        ("dirichlet-total-0.3-seed-0", "per class (as in Flower, FedML, pfl) it is 0.03"),
        ("dirichlet-per-class-0.03-seed-0", "alpha 0.03 is per class (as in Flower, FedML, pfl)"),
        ("users", ""),
    ],
)
def test_a_report_says_what_alpha_counts(name: str, note: str, tmp_path: Path) -> None:
    """Issue 17.38."""
    made_run(tmp_path / "a", "cifar10-fedavg", 0, 40.0, f"--data.partition={name}")
    rows = report.make_rows([read_finished(tmp_path / "a")], {})
    text = report.markdown(rows, [], (10,), (50,))
    assert note in text
    assert ("Flower" in text) == bool(note)


def test_rows_of_one_setting_are_told_apart_by_what_differs() -> None:
    base: Tree = {"seed": 0, "local": {"learning_rate": 0.1, "num_epochs": 1}}
    other: Tree = {"seed": 1, "local": {"learning_rate": 0.2, "num_epochs": 1}}
    assert report.differences(base, [base, other]) == ["local.learning_rate 0.1"]
    assert report.differences(base, [base, {**base, "seed": 7}]) == []


def test_a_row_names_an_algorithm_that_is_not_its_settings(tmp_path: Path) -> None:
    made_run(tmp_path / "a", "cifar10-fedavg", 0, 40.0, "--federated.algorithm=qffl")
    (alone,) = report.make_rows([read_finished(tmp_path / "a")], {})
    assert alone.label == "cifar10-fedavg, algorithm qffl"
    made_run(tmp_path / "b", "cifar10-fedavg", 0, 40.0, "--local.num_epochs=3")
    rows = report.make_rows([read_finished(tmp_path / name) for name in "ab"], {})
    assert rows[0].label.startswith("cifar10-fedavg, algorithm qffl, local.num_epochs 1")
    assert rows[1].label.startswith("cifar10-fedavg, local.num_epochs 3")
    assert not any("federated.algorithm" in row.label for row in rows)


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("setting: x\n")
    assert run_command(report.main, [str(tmp_path)]) == 2
    assert "it has not finished" in capsys.readouterr().err
