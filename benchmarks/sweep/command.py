"""Hyperparameter sweeps of any benchmark, in wandb's YAML: by wandb's agent, or without a server.

    python -m benchmarks.sweep learning-rates --local true [--workers 2] [--devices cuda:0,cuda:1]
                                     [--sweep_dir D] [--count N] [--sweep_seed N] [--np N] [training keys]
    python -m benchmarks.sweep learning-rates [--count N] [training keys]     registers the sweep with wandb
    python -m benchmarks.sweep ENTITY/PROJECT/SWEEP_ID [--count N]            runs trials of that sweep

A YAML without ``command`` runs the training of ``--program``: benchmarks.flair.train (the default), or
that of visual_classification, fedcv.classification, fedcv.segmentation or fedcv.detection.
The same command resumes a local sweep that was stopped.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.command_line import own_arguments
from benchmarks.core.config.trees import build
from benchmarks.core.tracking import has_wandb_key
from benchmarks.sweep.local import LocalSweep, Options
from benchmarks.sweep.space import Sweep, command_words, read_sweep
from benchmarks.sweep.study import content_of
from dataset.files import locked, needed

SWEEP_ID = re.compile(r"[\w.-]+/[\w.-]+/\w+")


def training_words(sweep: Sweep, extra: Sequence[str]) -> list[str]:
    """The sweep's training arguments without the swept ones: the command's, then the user's own.

    Raises:
        ValueError: where a swept key is fixed too, by which every trial would be the same.
    """
    after = sweep.command[sweep.command.index(sweep.program_module) + 1 :]
    for key in sweep.experiment.benchmark.words(extra).keys() & sweep.parameters.keys():
        raise ValueError(
            f"--{key} is a parameter of the sweep: remove it from the arguments, or from the sweep's "
            "parameters"
        )
    return [*(word for word in after if word != "${args}"), *extra]


def ranked_run(sweep: Sweep, words: Sequence[str]) -> AnyRun:
    """The run that all trials vary.

    Raises:
        ValueError: where it has not the metric that the sweep ranks by: what to choose or add.
    """
    run: AnyRun = sweep.experiment.benchmark.parse(words)
    known = [f"val/{name}" for name in sweep.experiment.scores]
    if sweep.ranking.name not in known:
        raise ValueError(f"metric.name is {sweep.ranking.name!r}: choose one of {', '.join(known)}")
    if getattr(run.config.data, "scored", "val") != "val":
        raise ValueError(
            "the sweep ranks trials by val, but its runs are not scored on val: add --data.scored=val"
        )
    return run


def local(name: str, options: Options, extra: Sequence[str]) -> None:
    """Run a sweep with no server."""
    sweep, tree, path = read_sweep(name, options.program)
    training, words_of = training_words(sweep, extra), sweep.experiment.benchmark.words
    for key in sorted({"run_dir", "extend", "resume", "runtime.device"} & words_of(training).keys()):
        where = "the arguments" if key in words_of(extra) else f"the command of {path}"
        raise ValueError(
            f"--{key} is set by the sweep itself: remove it from {where} (use --sweep_dir and --devices "
            "instead)"
        )
    words, data_path = sweep.experiment.resolve_data([*training, "--runtime.progress=false"])
    run = ranked_run(sweep, words)
    directory = options.sweep_dir or Path(f"runs/sweeps/{path.stem}-{data_path.stem}")
    if (directory / "sweep.json").exists():
        raise ValueError(
            f"{directory} holds a sweep of an earlier version (sweep.json), which cannot go on: report on "
            "the runs in its trials/, and choose another --sweep_dir"
        )
    sweep.experiment.ready_data(run, data_path)
    if "runtime.track" not in words_of(extra):
        words.append("--runtime.track=none")
    words = command_words({**words_of(words), "data_path": data_path})
    if options.devices is None and (cuda := torch.cuda.device_count()):
        options = dataclasses.replace(options, devices=",".join(f"cuda:{i}" for i in range(cuda)))
    refusal = f"{directory} is in use by another process: wait, or choose another --sweep_dir"
    with locked(directory / "lock", refusal):
        LocalSweep(sweep, tree, words, directory, options, content_of(run, data_path)).run()


def with_wandb(name: str, options: Options, extra: Sequence[str]) -> None:
    """Register a sweep with wandb, or join one, and work on it as wandb's agent."""
    joined = SWEEP_ID.fullmatch(name) and not Path(name).exists()
    tree: dict[str, Any] = {}
    if not joined:
        sweep, tree, path = read_sweep(name, options.program)
        words = training_words(sweep, extra)
        if "run_dir" not in sweep.experiment.benchmark.words(words):
            extra = [*extra, f"--run_dir=runs/sweeps/{sweep.name or path.stem}/{{digest}}"]
        _, point = next(sweep.candidates(0, 0, []))
        ranked_run(sweep, [*words, *command_words(point)])  # names an unknown key before any trial does
        place = sweep.command.index("${args}")
        tree = {**tree, "command": [*sweep.command[:place], *extra, *sweep.command[place:]]}
    elif words := [word for word in extra if not word.startswith("--data_path=")]:  # which make always gives
        raise ValueError(f"the arguments of sweep {name} stand in its command at wandb: remove {words[0]}")
    if not has_wandb_key():
        raise ValueError(
            "no wandb key was found: run wandb login, or sweep without it: LOCAL=1 (--local true)"
        )
    wandb = needed("wandb", "wandb")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        sweep_id = (
            name if joined else wandb.sweep(tree, entity=tree.get("entity"), project=tree.get("project"))
        )
        wandb.agent(sweep_id, count=options.count)
    except (wandb.Error, ValueError) as fault:
        raise OSError(
            f"wandb cannot run the sweep: {fault}; LOCAL=1 (--local true) needs no server"
        ) from fault


def main(argv: Sequence[str]) -> None:
    """Parse, then one of the two."""
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__)
        return None
    name, *rest = argv
    if name.startswith("--"):
        raise ValueError(f"give the sweep first: python -m benchmarks.sweep NAME_OR_YAML {name} ...")
    values, extra = own_arguments(Options, rest)
    options = build(Options, values, "the sweep's options", "--")
    if options.local:
        return local(name, options, extra)
    for key in sorted(values.keys() - {"local", "count", "program"}):
        raise ValueError(
            f"--{key} can be used only for local sweeps: add --local true (LOCAL=1), or remove it"
        )
    return with_wandb(name, options, extra)
