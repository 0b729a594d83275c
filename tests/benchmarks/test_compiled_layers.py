"""Runs whose layers are compiled learn what torch's layers learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.core.config.trees import Tree
from pfl_ext.engine.cpu.choice import chosen
from tests.benchmarks.conftest import ONE_ROUND, RESNET18, Train
from tests.benchmarks.moved import DRAWS, Scored, assert_as_near_as_rounding, inexact, watched
from tests.benchmarks.run_files import results
from tests.benchmarks.test_train import compiled_kernels
from tests.pfl_ext.engine.cpu.roundings import BFLOAT16, half_rounding, rounding


@pytest.mark.parametrize(
    ("config", "length"),
    [("fl-r-17", "--federated.num_rounds=2"), ("c-r-17", "--centralised.num_epochs=1")],
)
def test_compiled_layers_learn_what_torchs_learn(
    config: str, length: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32 and in bfloat16, each as near to torch's float32 as its rounding leaves it."""

    def run(name: str, *words: str) -> tuple[list[Scored], Tree]:
        with watched() as seen:
            directory = train(f"--config={config}", length, "--model.arch=squeezenet1_1", *words, name=name)
        return seen, results(directory)

    by_torch = "--runtime.cpu_kernels=false"
    torchs, their_results = run("torchs", by_torch)
    compiled, our_results = run("compiled")
    half, half_results = run("half", "--runtime.precision=bf16")
    assert f"training is computed in {half_results['arithmetic']}\n" in capsys.readouterr().out
    assert their_results["arithmetic"] == "float32: all layers by torch"
    kernels = compiled_kernels()
    halves = kernels is not None and kernels.has_halves
    for name, ours, off in (
        ("compiled", compiled, lambda terms: rounding(terms, winograd=True)),
        ("half", half, lambda terms: half_rounding(terms, winograd=True) if halves else 3 * BFLOAT16),
    ):
        moved = []
        for seed in DRAWS:
            with inexact(seed, off=off):
                moved.append(run(f"moved as {name} {seed}", by_torch)[0])
        assert_as_near_as_rounding(ours, torchs, moved)
    if kernels is not None:
        assert our_results["model_sha256"] != their_results["model_sha256"]
        same = half_results["model_sha256"] == our_results["model_sha256"]
        row = chosen(torch.bfloat16, kernels.feature)
        assert same == (row.autocast is None)
        assert half_results["arithmetic"].startswith("float32: " if same else "bfloat16: ")


def test_a_network_whose_maps_are_too_small_for_bfloat16_is_trained_in_float32_and_says_so(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = [train(*RESNET18, *ONE_ROUND, f"--runtime.precision={p}", name=p) for p in ("bf16", "fp32")]
    assert "the bfloat16 gradient of torch is wrong for its layer4.0.conv1" in (capsys.readouterr().err)
    assert results(trained[0])["model_sha256"] == results(trained[1])["model_sha256"]
