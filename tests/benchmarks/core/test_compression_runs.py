"""Runs whose updates are compressed: the equations in float64, kill and resume, workers, privacy, refusals.

test_compression_runs DATA DIRECTORY          trains one, as one of the workers of a launcher
"""

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
from pfl_ext.algorithms.channel import FILE
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.randomness import stream
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed, killed_at
from tests.benchmarks.core import quadratics, worker_runs
from tests.benchmarks.core.quadratics import Array, Direct, run_of, trajectory
from tests.benchmarks.run_files import lines, results

KIND, OPTION = "--compression.kind=", "--compression.options."
TOP_K = (f"{KIND}top_k", f"{OPTION}share=0.25")
PARTIAL: dict[str, Any] = {"federated": {"cohort_size": 3, "weighting": "images"}}


class Compressed(Direct):
    """FedAvg whose users' updates are compressed, with what they keep, in float64."""

    errors: dict[int, Array]

    def trajectory(self) -> Array:
        self.errors, self.number = {}, -1
        return super().trajectory()

    def mean_update(self, x: Array, data: FederatedImageDataset) -> Array:
        self.number += 1
        return super().mean_update(x, data)

    def user(self, x: Array, user: int, images: Any) -> Any:
        update, counts, change = super().user(x, user, images)
        section = self.run.config.compression
        options = section.options or {}
        whole, draws = update + self.errors.get(user, 0.0), stream(0, "compression", self.number, user)
        if section.kind == "top_k":
            sent = np.zeros_like(whole)
            places = np.argsort(-np.abs(whole))[: round(options["share"] * len(whole))]
            sent[places] = whole[places]
        elif section.kind == "random_k":
            k, sent = round(options["share"] * len(whole)), np.zeros_like(whole)
            places = draws.choice(len(whole), k, replace=False, shuffle=False)
            sent[places] = whole[places] * len(whole) / k
        else:
            parts = whole[: -quadratics.CLASSES], whole[-quadratics.CLASSES :]
            sent = np.concatenate([np.where(part >= 0, 1, -1) * np.abs(part).mean() for part in parts])
        if options.get("error_feedback"):
            self.errors[user] = whole - sent
        return sent, counts, change


KINDS: dict[str, dict[str, Any]] = {
    "top_k": {"share": 0.25},
    "top_k without feedback": {"share": 0.25, "error_feedback": False},
    "random_k": {"share": 0.5},
    "sign": {},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_run_is_the_equations_in_both_engines(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = merge(PARTIAL, {"compression": {"kind": name.split()[0], "options": KINDS[name]}})
    expected = Compressed(run_of(tree)).trajectory()
    for engine in ("stock", "fast"):
        found = trajectory(run_of(tree, engine), tmp_path / engine)
        assert quadratics.distances(found, expected).max() < quadratics.TOLERANCE, engine
    assert "pfl's own loop" not in capsys.readouterr().err, "the engine took the work on"
    plain = trajectory(run_of(PARTIAL), tmp_path / "plain")
    assert quadratics.distances(plain, expected).max() > 1000 * quadratics.TOLERANCE


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "fednova"])
@pytest.mark.parametrize(
    "section",
    [
        {"kind": "top_k", "options": {"share": 1}},
        {"kind": "uniform", "options": {"bits": 32}},
        {"kind": "low_rank", "options": {"rank": 3}},
    ],
    ids=lambda section: section["kind"],
)
def test_all_of_it_is_plain_training(section: dict[str, Any], algorithm: str, tmp_path: Path) -> None:
    tree = merge(PARTIAL, {"federated": {"algorithm": algorithm}})
    plain = trajectory(run_of(tree, "fast"), tmp_path / "plain")
    found = trajectory(run_of(merge(tree, {"compression": section}), "fast"), tmp_path / "compressed")
    assert quadratics.distances(found, plain).max() < quadratics.TOLERANCE


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_it_is_killed_and_goes_on_bit_for_bit(algorithm: str, train: Train) -> None:
    size = ("--federated.num_rounds=4", "--federated.cohort_size=8")
    argv = (*TOP_K, f"--federated.algorithm={algorithm}", *size)
    whole, directory = killed_and_resumed(train, 2, *argv)
    assert (directory / "checkpoint" / FILE).stat().st_size > 0
    if algorithm == "fedper":
        return
    forgetful = train(*argv, f"{OPTION}error_feedback=false", name="forgetful")
    assert results(forgetful)["model_sha256"] != results(whole)["model_sha256"]


def test_what_a_user_sends_and_keeps_does_not_depend_on_its_weight(train: Train) -> None:
    """A user compresses its own update; the server, which has the weights, weighs what it gets."""
    kept = [
        (
            train(*TOP_K, f"--federated.weighting={by}", "--federated.num_rounds=1", name=by)
            / "checkpoint"
            / FILE
        )
        for by in ("images", "users")
    ]
    assert kept[0].stat().st_size > 0
    assert kept[0].read_bytes() == kept[1].read_bytes()


def test_what_users_keep_is_removed_with_the_checkpoints_and_checked_before_a_run_goes_on(
    train: Train, refused: Refused
) -> None:
    argv = (*TOP_K, "--federated.num_rounds=3")
    with killed_at(2):
        directory = train(*argv, code=130)
    file = directory / "checkpoint" / FILE
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    refused(f"{FILE} is not the one that the checkpoint was written with", *argv)
    file.write_bytes(content)
    train(*argv, "--runtime.keep_checkpoints=false")
    assert not file.exists()


def test_bytes_are_counted_by_formula(train: Train) -> None:
    plain = results(train("--federated.num_rounds=1", name="plain"))["traffic"]
    d = plain["up"] // 4
    for words, expected in (
        (TOP_K, 4 * round(0.25 * d) + -(-d // 8)),
        ((f"{KIND}uniform", f"{OPTION}bits=4", "--federated.algorithm=fednova"), -(-d // 2) + 8 * 10 + 4),
    ):
        found = results(train(*words, "--federated.num_rounds=1", name=words[0][-5:]))["traffic"]
        assert found == {"down": plain["down"], "up": expected}
    words = ("--federated.algorithm=fedper", "--federated.num_rounds=1")
    whole = results(train(*words, name="fedper"))["traffic"]["up"]
    found = results(train(*words, f"{KIND}random_k", f"{OPTION}share=0.5", name="half"))["traffic"]["up"]
    assert whole < plain["up"]
    assert found == 4 * round(0.5 * (whole // 4)) + 8


PRIVATE = (*worker_runs.PRIVATE, "--privacy.clipping_bound=1000", "--federated.num_rounds=1", "--seed=1")


def test_a_private_run_clips_and_measures_the_compressed_update(train: Train) -> None:
    plain = lines(train(*PRIVATE, name="plain"))[0]["privacy"]
    words = (f"{KIND}random_k", f"{OPTION}share=0.04")
    found = lines(train(*PRIVATE, *words))[0]["privacy"]
    # random-k multiplies a norm by about sqrt(d / k), here 5
    ratio = found["norm before clipping"] / plain["norm before clipping"]
    assert ratio == pytest.approx(5, rel=0.2)
    assert found["fraction clipped"] == 0
    bound = found["norm before clipping"] / 100
    tight = lines(train(*PRIVATE, *words, f"--privacy.clipping_bound={bound}", name="tight"))[0]["privacy"]
    assert tight["fraction clipped"] == 1
    assert tight["norm before clipping"] == found["norm before clipping"]


LOCAL = ("--federated.weighting=users", "--local_privacy.epsilon=4")


@pytest.mark.parametrize(
    "argv, message",
    [
        ([f"{KIND}zip"], "compression.kind is 'zip': choose one of float32, low_rank, random_k, sign, top_k"),
        ([f"{KIND}top_k", f"{OPTION}share=0"], "compression.options.share is '0': "),
        ([f"{KIND}top_k", f"{OPTION}bits=8"], "compression.options.bits is not an option of top_k, which"),
        ([f"{OPTION}share=0.5"], "compression.options.share is not an option of float32"),
        ([f"{KIND}uniform", f"{OPTION}bits=33"], "compression.options.bits is '33': "),
        ([f"{KIND}sign", "--federated.algorithm=scaffold"], "compression.kind is sign, but federated.algori"),
        (
            [f"{KIND}sign", "--federated.algorithm=fed3r"],
            "does not support it: set compression.kind to float32",
        ),
        (
            [f"{KIND}sign", "--federated.algorithm=hierarchical"],
            "or choose ditto or fedavg or fedbn or fednova or fedper",
        ),
        ([f"{KIND}top_k", "--federated.replacement=true"], "must not be drawn twice in a cohort: set"),
        ([*TOP_K, f"{OPTION}max_state_gb=1e-6"], "users, above compression.options.max_state_gb = 1e-06"),
        ([*TOP_K, *PRIVATE], "privacy refuses compression.options.error_feedback = true"),
        ([f"{KIND}uniform", *LOCAL], "local_privacy refuses compression.kind = uniform"),
        ([f"{KIND}random_k", *LOCAL], "local_privacy refuses compression.kind = random_k"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    argv: Sequence[str], message: str, refused: Refused
) -> None:
    refused(message, *argv)


def test_a_centralised_run_has_no_updates() -> None:
    with pytest.raises(ValueError, match=r"^--compression\.kind has no effect where mode is centralised"):
        parse(["--config=c-r-17", f"{KIND}sign"])


def test_a_run_without_compression_has_the_digest_that_it_had() -> None:
    plain = parse([])
    assert "compression" not in config_tree(plain.config)
    assert digest(parse([f"{KIND}float32"]).config) == digest(plain.config)
    assert digest(parse(TOP_K).config) != digest(plain.config)
