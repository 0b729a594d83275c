"""Runs that go on where shorter ones ended: equal to runs that had been this long from the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pfl_ext.checkpoint import load, previous
from tests.benchmarks.conftest import Refused, Train, killed_at
from tests.benchmarks.run_files import results, timeless

KEPT = ("--runtime.keep_checkpoints=true", "--runtime.checkpoint_every=1")
MOMENTUM = ("--server.optimizer=sgd", "--server.momentum=0.9", "--server.learning_rate=0.5")
CASES = {
    "momentum": MOMENTUM,
    "scaffold": ("--federated.algorithm=scaffold",),
    "ditto": ("--federated.algorithm=ditto",),
    "dsgd": ("--federated.algorithm=dsgd", "--evaluation.best_by=last"),
    "errors": ("--compression.kind=top_k", *MOMENTUM),
    "centralised": ("--config=c-r-17",),
    "tuned": (
        "--federated.algorithm=fedper",
        "--federated.options.tune_epochs=1",
        "--federated.options.score_every=2",
        "--local.schedule=exponential",
        "--local.schedule_factor=0.1",
    ),
}


def rounds(words: tuple[str, ...], number: int) -> str:
    kind = "centralised.num_epochs" if "--config=c-r-17" in words else "federated.num_rounds"
    return f"--{kind}={number}"


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_run_that_was_this_long_from_the_start(name: str, train: Train) -> None:
    """The short run has ended, or was killed after its second step; it is left as it was.

    A killed run has one more line than its checkpoint, whatever it trains: two kinds of runs are killed.
    """
    words = CASES[name]
    whole = train(*words, rounds(words, 4), name="whole")
    shorter = [train(*words, *KEPT, rounds(words, 2), name="ended")]
    if name in ("momentum", "ditto"):
        with killed_at(2):
            shorter.append(train(*words, *KEPT, rounds(words, 3), name="killed", code=130))
    for short in shorter:
        argv = (*words, rounds(words, 4), f"--extend={short}")
        before = {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}
        longer = train(*argv, name=f"after-{short.name}")
        assert timeless(longer) == timeless(whole)
        assert results(longer)["model_sha256"] == results(whole)["model_sha256"]
        assert {path: path.read_bytes() for path in short.rglob("*") if path.is_file()} == before
        train(*argv, name=f"after-{short.name}")  # shows its results


def test_a_longer_run_that_is_killed_goes_on_itself(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(*MOMENTUM, "--federated.num_rounds=4", name="whole")
    short = train(*MOMENTUM, *KEPT, "--federated.num_rounds=2", name="short")
    words = (*MOMENTUM, "--federated.num_rounds=4", f"--extend={short}", "--runtime.checkpoint_every=1")
    with killed_at(3):
        train(*words, name="longer", code=130)
    said = f"has begun: it continues by itself, and --extend {short} has no effect\n"
    assert said not in capsys.readouterr().out
    assert timeless(train(*words, name="longer")) == timeless(whole)
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "words", "message"),
    [
        (("--runtime.keep_checkpoints=false",), (), "has no checkpoint, because a finished run keeps it"),
        (
            ("--evaluation.every_rounds=3",),
            ("--evaluation.every_rounds=3",),
            "which is not a multiple of evaluation",
        ),
        (
            ("--local.schedule=cosine",),
            ("--local.schedule=cosine",),
            "so a run of 4 rounds would have used other rates: start a new run",
        ),
        (
            ("--local_privacy.epsilon=4", "--federated.weighting=users", "--seed=1"),
            ("--local_privacy.epsilon=4", "--federated.weighting=users", "--seed=1"),
            "is private, and its noise was computed for 2 rounds, so it cannot be",
        ),
    ],
)
def test_what_would_be_another_run_is_refused(
    first: tuple[str, ...], words: tuple[str, ...], message: str, train: Train, refused: Refused
) -> None:
    short = train(*KEPT, "--federated.num_rounds=2", *first, name="short")
    refused(message, "--federated.num_rounds=4", *words, f"--extend={short}", name="longer")


def test_other_configs_other_data_and_folders_without_a_run_are_refused(
    train: Train, refused: Refused, tmp_path: Path, classes_file: Path
) -> None:
    refused(f"--extend {tmp_path} has no run", f"--extend={tmp_path}")
    short = train(*KEPT, "--federated.num_rounds=2", name="short")
    longer = ("--federated.num_rounds=4", f"--extend={short}")
    refused("has 2 rounds: set federated.num_rounds to more", *longer, "--federated.num_rounds=2")
    changed = "is a run of another config (federated.num_rounds: 2 -> 4; local"
    refused(changed, *longer, "--local.learning_rate=0.3")
    said = "is a run on other data: give its data file with --data_path"
    refused(said, *longer, f"--data_path={classes_file}")


def test_a_config_that_was_edited_is_not_that_of_the_checkpoint(train: Train, refused: Refused) -> None:
    """Its first rounds were trained at another rate than the longer run would have stated."""
    short = train(*KEPT, "--federated.num_rounds=2", "--local.learning_rate=0.1", name="short")
    config = short / "config.yaml"
    config.write_text(
        re.sub(r"(local:.*?learning_rate: )0\.1", r"\g<1>0.3", config.read_text(), flags=re.DOTALL)
    )
    words = ("--federated.num_rounds=4", "--local.learning_rate=0.3", f"--extend={short}")
    refused("does not belong to its checkpoint", *words, name="longer")
    (short / "checkpoint" / "data.json").unlink()
    refused("does not belong to its checkpoint", *words, name="longer")


def test_where_states_of_users_are_damaged_it_goes_on_from_the_checkpoint_before(train: Train) -> None:
    """As the shorter run does itself."""
    words = ("--federated.algorithm=ditto", "--federated.cohort_size=2")
    whole = train(*words, "--federated.num_rounds=5", name="whole")
    with killed_at(3):
        short = train(*words, *KEPT, "--federated.num_rounds=4", name="short", code=130)
    file, last = (short / "checkpoint" / name for name in ("personal.f32", "last.safetensors"))
    rows, before = (
        next(tensor for name, tensor in load(path)[0].items() if name.endswith("rows")).tolist()
        for path in (last, previous(last))
    )
    content, length = bytearray(file.read_bytes()), file.stat().st_size // (max(*rows, *before) + 1)
    content[length * next(row for row in rows if row >= 0 and row not in before)] ^= 255
    file.write_bytes(content)
    longer = train(*words, "--federated.num_rounds=5", f"--extend={short}", name="longer")
    assert timeless(longer) == timeless(whole)


def test_what_was_trained_in_another_arithmetic_stays_said(train: Train) -> None:
    short = train(*KEPT, "--federated.num_rounds=2", "--runtime.cpu_kernels=false", name="short")
    first = results(short)["arithmetic"]
    longer = train("--federated.num_rounds=3", "--runtime.precision=bf16", f"--extend={short}", name="longer")
    said = results(longer)["arithmetic"]
    then = said.removeprefix(f"{first}; from round 2 on ")  # bfloat16, or float32 where a processor has none
    assert then not in (said, first)
    assert "; from round" not in then
