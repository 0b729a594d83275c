"""Runs of SCAFFOLD and FedDyn: they are killed and go on, or refused."""

from __future__ import annotations

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import pytest
import torch

from pfl_ext import checkpoint
from tests.benchmarks.conftest import Train, killed_and_resumed
from tests.benchmarks.run_files import error_line, results

FEDDYN = ("--federated.algorithm=feddyn", "--federated.options.alpha=0.1")


def test_feddyn_is_killed_and_goes_on_bit_for_bit(train: Train) -> None:
    """On the engine; by pfl's loop users keep and send the same."""
    argv = (*FEDDYN, "--runtime.engine=fast", "--federated.num_rounds=4", "--runtime.checkpoint_every=1")
    whole, directory = killed_and_resumed(train, 2, *argv)
    kept, again = (checkpoint.load(d / "checkpoint" / "last.safetensors")[0] for d in (whole, directory))
    for name in ("algorithm/c", "algorithm/digests"):
        assert torch.equal(kept[name], again[name])
        assert kept[name].any()
    size = sum(w.numel() * 4 for w in checkpoint.part(kept, checkpoint.MODEL).values())
    assert results(whole)["traffic"] == {"down": size, "up": size}


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--federated.options.alpha=0"], "federated.options.alpha is '0': "),
        (["--federated.options.max_state_gb=0.0001"], " GB on disk, above federated.options.max_state_gb"),
        (["--federated.mu=0.1"], "--federated.mu has no effect where federated.algorithm is feddyn"),
        (["--federated.max_state_gb=1"], "--federated.max_state_gb has no effect where"),
        (["--federated.replacement=true"], "FedDyn keeps one vector for each user, so a user must not be"),
        (["--federated.sampling=proportional"], "FedDyn's server keeps the mean over users, so all users"),
        (["--compression.kind=sign"], "compression.kind is sign, but federated.algorithm feddyn does not"),
        (
            ["--aggregation.kind=median"],
            "aggregation.kind is median, but federated.algorithm feddyn does not",
        ),
        (["--attack.kind=boost"], "attack.kind is boost, but federated.algorithm feddyn does not support"),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = feddyn"),
        (
            ["--federated.weighting=users", "--local_privacy.epsilon=4"],
            "local_privacy refuses federated.algo",
        ),
        (["--runtime.reduce=bf16"], "--runtime.reduce has no effect where federated.algorithm is feddyn"),
        (["--runtime.tune=true"], "--runtime.tune has no effect where federated.algorithm is feddyn"),
    ],
)
def test_what_feddyn_cannot_do_is_refused_in_one_line(
    argv: list[str], message: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--federated.algorithm=feddyn", *argv, code=2)
    assert message in error_line(capsys)
