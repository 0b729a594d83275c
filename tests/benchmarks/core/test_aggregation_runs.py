"""Runs with rules of aggregation and attackers: against float64, kill and resume, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest

from benchmarks.core.config.digests import config_tree, digest
from benchmarks.core.config.trees import merge
from benchmarks.flair.config import parse
from pfl_ext.attacks.attack import attackers
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.engine.one_step import train_one_step
from pfl_ext.randomness import stream
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import SIZES, Array, Direct, run_of, trajectory
from tests.benchmarks.core.test_compression_runs import LOCAL, PRIVATE, TOP_K
from tests.benchmarks.run_files import lines
from tests.pfl_ext.aggregation.test_rules import brute

RULE, ATTACK = "--aggregation.", "--attack."
BASE: dict[str, Any] = {"federated": {"cohort_size": len(SIZES), "weighting": "images"}}


class Aggregated(Direct):
    """FedAvg with attackers and another rule than the mean, in float64."""

    def trajectory(self) -> Array:
        self.number = -1
        return super().trajectory()

    def mean_update(self, x: Array, data: FederatedImageDataset) -> Array:
        self.number += 1
        config, by_images = self.run.config, self.run.config.federated.weighting == "images"
        options, attack = config.aggregation.options or {}, config.attack
        asked = attack.options or {}
        bad = attackers(config.seed, len(SIZES), attack.share)
        updates, weights, hostile = [], [], []
        for user in data.cohort(config.federated.cohort_size).tolist():
            images = data.user_dataset(user)
            update = self.user(x, user, images)[0]
            if attack.kind == "sign_flip" and bad[user]:
                update = -asked["scale"] * update
            updates.append(update)
            weights.append(float(len(images)) if by_images else 1.0)
            hostile.append(attack.kind == "alie" and bad[user])
        stacked, p, worst = np.array(updates), np.array(weights), np.array(hostile)
        if worst.any():
            honest = stacked[~worst]
            stacked[worst] = honest.mean(0) - asked["z"] * honest.std(0)
        size, kind = options.get("bucket_size", 1), config.aggregation.kind
        if kind in ("median", "trimmed_mean", "krum", "multi_krum"):
            p = np.ones(len(p))
        if size > 1:
            order = stream(config.seed, "aggregation buckets", self.number).permutation(len(p))
            groups = [order[first : first + size] for first in range(0, len(order), size)]
            stacked = np.array([p[g] / p[g].sum() @ stacked[g] for g in groups])
            p = np.array([p[g].sum() for g in groups])
        if kind == "norm_bound":
            norms = np.linalg.norm(stacked, axis=1)
            limit = options["bound"] * (1 - 2**-14)
            return np.asarray(p / p.sum() @ (stacked * np.minimum(1, limit / norms)[:, None]))
        return np.asarray(brute(kind, stacked, p, int(options.get("tolerated", 0) * len(p) + 1e-9)))


FLIP = {"kind": "sign_flip", "share": 0.4, "options": {"scale": 3.0}}
ALIE = {"kind": "alie", "share": 0.4, "options": {"z": 1.5}}
CASES: dict[str, dict[str, Any]] = {
    "mean, sign flip": {"attack": FLIP},
    "mean, alie": {"attack": ALIE},
    "norm bound": {"aggregation": {"kind": "norm_bound", "options": {"bound": 0.5}}},
    "norm bound, sign flip": {
        "aggregation": {"kind": "norm_bound", "options": {"bound": 0.5}},
        "attack": FLIP,
    },
    "norm bound, alie": {"aggregation": {"kind": "norm_bound", "options": {"bound": 0.5}}, "attack": ALIE},
    "median, sign flip": {"aggregation": {"kind": "median"}, "attack": FLIP},
    "median, alie": {"aggregation": {"kind": "median"}, "attack": ALIE},
    "trimmed mean": {"aggregation": {"kind": "trimmed_mean", "options": {"tolerated": 0.2}}, "attack": FLIP},
    "krum": {"aggregation": {"kind": "krum", "options": {"tolerated": 0.2}}, "attack": FLIP},
    "multi krum": {"aggregation": {"kind": "multi_krum", "options": {"tolerated": 0.2}}, "attack": ALIE},
    "geometric median": {"aggregation": {"kind": "geometric_median"}, "attack": FLIP},
    "buckets": {"aggregation": {"kind": "geometric_median", "options": {"bucket_size": 2}}, "attack": FLIP},
    "buckets, median": {"aggregation": {"kind": "median", "options": {"bucket_size": 2}}, "attack": FLIP},
}


BY_PFLS_LOOP = ("mean, sign flip", "norm bound, alie", "median, alie")
"""One of each way in which updates reach the server; the rules are then the same functions of them."""


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_equations_in_both_engines(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = merge(BASE, CASES[name])
    expected = Aggregated(run_of(tree)).trajectory()
    for engine in ("stock", "fast") if name in BY_PFLS_LOOP else ("fast",):
        found = trajectory(run_of(tree, engine), tmp_path / engine)
        assert quadratics.distances(found, expected).max() < quadratics.TOLERANCE, engine
    assert "pfl's own loop" not in capsys.readouterr().err, "the engine took the work on"
    plain = Aggregated(run_of(BASE)).trajectory()
    assert quadratics.distances(plain, expected).max() > 1000 * quadratics.TOLERANCE


def test_without_attackers_the_mean_is_direct_fedavg() -> None:
    run = run_of(BASE)
    np.testing.assert_allclose(Aggregated(run).trajectory(), Direct(run).trajectory(), rtol=1e-12)


def test_a_norm_bound_is_computed_by_the_engine_for_all_users_at_once(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--local.batch_size=64", "--local.num_epochs=1", "--federated.num_rounds=2")
    together: list[int] = []

    def watched(*given: Any) -> None:
        together.append(len(given[3]))
        train_one_step(*given)

    monkeypatch.setattr("pfl_ext.engine.cohort.train_one_step", watched)
    bound = (f"{RULE}kind=norm_bound", f"{RULE}options.bound=1e-3")
    fast = train(*argv, *bound, name="fast")
    assert sum(together) == 2 * 4
    stock = train(*argv, *bound, "--runtime.engine=stock", name="stock")
    for a, b in zip(lines(fast), lines(stock)):
        assert a.get("bounded") == b.get("bounded")
    assert lines(fast)[0]["bounded"] == 1
    wide = train(*argv, f"{RULE}kind=norm_bound", f"{RULE}options.bound=1e3", name="wide")
    plain = train(*argv, name="plain")
    assert lines(wide)[0]["bounded"] == 0
    assert lines(wide)[-1]["val"] == lines(plain)[-1]["val"]


SPOOLED = (f"{RULE}kind=multi_krum", f"{ATTACK}kind=alie", f"{ATTACK}share=0.25", "--federated.cohort_size=8")


@pytest.mark.parametrize("more", [(f"{ATTACK}kind=alie",), (f"{ATTACK}kind=gaussian", *TOP_K)])
def test_it_is_killed_and_goes_on_bit_for_bit(more: tuple[str, ...], train: Train) -> None:
    argv = (*SPOOLED[:1], *SPOOLED[2:], f"{RULE}options.bucket_size=2", f"{RULE}options.tolerated=0", *more)
    whole, directory = killed_and_resumed(train, 2, *argv, "--federated.num_rounds=4")
    names = {path.name for path in (directory / "checkpoint").iterdir()}
    assert names == {path.name for path in (whole / "checkpoint").iterdir()}


def test_flipped_labels_are_trained_on_and_scored_by_nobody(train: Train) -> None:
    argv = ("--federated.num_rounds=1", "--federated.cohort_size=8", "--local.learning_rate=1")
    plain = train(*argv, name="plain")
    flipped = train(*argv, f"{ATTACK}kind=label_flip", f"{ATTACK}share=0.4", name="flipped")
    assert lines(plain)[0]["val"] == lines(flipped)[0]["val"]
    assert lines(plain)[0]["train_loss"] != lines(flipped)[0]["train_loss"]


def test_an_update_that_is_not_finite_is_left_out_and_counted(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--federated.num_rounds=2", "--federated.cohort_size=8", f"{ATTACK}share=0.25")
    huge = (f"{ATTACK}kind=boost", f"{ATTACK}options.scale=1e45")
    found = lines(train(*argv, *huge, f"{RULE}kind=median", name="median"))
    bad = attackers(parse([]).config.seed, 12, 0.25)
    assert bad.sum() == 3
    assert 0 < found[0]["left_out"] <= 3
    assert np.isfinite(found[-1]["val"]["loss"])


NEEDS = (
    "aggregation.kind is krum, which needs n > 2 f + 2, but a round has n = 4 updates, of which f = 1 may be"
)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([f"{RULE}kind=mode"], "aggregation.kind is 'mode': choose one of geometric_median, krum, mean"),
        ([f"{ATTACK}kind=evil"], "attack.kind is 'evil': choose one of alie, boost, gaussian, honest"),
        ([f"{RULE}kind=krum", f"{RULE}options.tolerated=0.25"], NEEDS),
        ([f"{RULE}kind=krum", f"{RULE}options.tolerated=0.5"], "aggregation.options.tolerated is '0.5': "),
        (
            [f"{RULE}kind=median", f"{RULE}options.tolerated=0.2"],
            "is not an option of median, which has bucket_si",
        ),
        ([f"{RULE}kind=multi_krum", f"{RULE}options.kept=5"], "aggregation.options.kept is 5, but must be"),
        (
            [f"{RULE}kind=norm_bound", f"{RULE}options.bound=1e30"],
            "aggregation.options.bound is 1e+30: it mu",
        ),
        (
            [f"{RULE}kind=median", f"{RULE}options.max_state_gb=1e-6"],
            "above aggregation.options.max_state_gb",
        ),
        (
            [f"{RULE}kind=median", "--federated.replacement=true"],
            "aggregation.kind is median, which needs exact",
        ),
        (
            [f"{ATTACK}kind=alie", "--federated.replacement=true"],
            "attack.kind is alie, which needs exactly one update of each user in a",
        ),
        (
            [f"{ATTACK}kind=alie", "--compression.kind=sign"],
            "set compression.kind to float32, or choose anot",
        ),
        (
            [f"{RULE}kind=median", "--federated.weighting=users"],
            "federated.weighting has no effect where aggr",
        ),
        ([f"{ATTACK}share=0.3"], "--attack.share has no effect where attack.kind is honest"),
        ([f"{ATTACK}kind=alie", f"{ATTACK}share=0.5"], "attack.share is '0.5': "),
        ([f"{ATTACK}kind=alie", f"{ATTACK}share=0.02"], "attack.share is 0.02, with which none of the 12"),
        (
            [f"{RULE}kind=median", "--federated.algorithm=fednova"],
            "but federated.algorithm fednova does not support it: set",
        ),
        (
            [f"{ATTACK}kind=boost", "--federated.algorithm=scaffold"],
            "set attack.kind to honest, or choose fed",
        ),
        (
            [f"{RULE}kind=norm_bound", "--federated.algorithm=fedper"],
            "but federated.algorithm fedper does not support it: set",
        ),
        ([f"{RULE}kind=median", *PRIVATE], "privacy refuses aggregation.kind = median"),
        ([f"{ATTACK}kind=sign_flip", *PRIVATE], "privacy refuses attack.kind = sign_flip"),
        ([f"{ATTACK}kind=alie", *PRIVATE], "privacy refuses attack.kind = alie"),
        ([f"{RULE}kind=krum", *LOCAL], "local_privacy refuses aggregation.kind = krum"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    argv: Sequence[str], message: str, refused: Refused
) -> None:
    refused(message, *argv)


def test_a_private_run_measures_the_bounded_update(train: Train) -> None:
    bound = 1e-3
    words = (f"{RULE}kind=norm_bound", f"{RULE}options.bound={bound}")
    found = lines(train(*PRIVATE, *words))[0]["privacy"]
    assert found["norm before clipping"] == pytest.approx(bound, rel=2e-4)
    assert found["fraction clipped"] == 0


def test_a_run_without_them_has_the_digest_that_it_had() -> None:
    plain = parse([])
    assert not {"aggregation", "attack"} & set(config_tree(plain.config))
    assert digest(parse([f"{RULE}kind=mean", f"{ATTACK}kind=honest"]).config) == digest(plain.config)
    assert digest(parse([f"{RULE}kind=median"]).config) != digest(plain.config)
    shares = [digest(parse([f"{ATTACK}kind=alie", f"{ATTACK}share={s}"]).config) for s in (0.1, 0.2)]
    assert len({*shares, digest(plain.config)}) == 3
