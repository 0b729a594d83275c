"""Hyperparameter sweeps of any benchmark from wandb's YAML: by wandb's agent or, ``--local true``, no server.

    python -m benchmarks.sweep learning-rates --local true [--workers 2] [--devices cuda:0,cuda:1]
                                     [--sweep_dir D] [--count N] [--sweep_seed N] [--np N] [training keys]
    python -m benchmarks.sweep learning-rates [--count N] [training keys]     registers it with wandb
    python -m benchmarks.sweep ENTITY/PROJECT/SWEEP_ID [--count N]            helps with that one

A YAML without ``command`` runs the training of ``--program`` (default: benchmarks.flair.train).
A local sweep that was stopped goes on by the same command.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.core.config.command_line import arguments
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.tracking import has_wandb_key
from benchmarks.sweep.local import LocalSweep, alone, resolved
from benchmarks.sweep.space import Sweep, command_words, read_sweep

OWN = ("local", "workers", "devices", "sweep_dir", "count", "sweep_seed", "np", "program")
SWEEP_ID = re.compile(r"[\w.-]+/[\w.-]+/\w+")


def training_words(sweep: Sweep, extra: Sequence[str]) -> list[str]:
    """The sweep's training arguments without the swept ones: the command's, then the user's own.

    :raises ValueError: where a swept key is fixed too, by which every trial would be the same.
    """
    after = sweep.command[sweep.command.index(sweep.program_module) + 1 :]
    words = [word for word in after if word != "${args}"]
    for key in arguments(extra).keys() & sweep.parameters.keys():
        raise ValueError(f"--{key} is swept: take it out of the arguments, or of the sweep's parameters")
    return [*words, *extra]


def _number(given: Mapping[str, str], key: str, default: int | None, least: int = 1) -> int | None:
    text = given.get(key)
    if text is None:
        return default
    if not text.isdigit() or int(text) < least:
        raise ValueError(f"--{key} is {text!r}: give a whole number of at least {least}")
    return int(text)


def check_ranking(sweep: Sweep, config: TrainingConfig) -> None:
    """Refuse a sweep by a metric that its runs do not have.

    Raises:
        ValueError: the metrics to choose from, or what to add.
    """
    known = [f"val/{name}" for name in importlib.import_module(sweep.program_module).EXPERIMENT.scores]
    if sweep.metric is not None and sweep.metric.name not in known:
        raise ValueError(f"metric.name is {sweep.metric.name!r}: choose one of {', '.join(known)}")
    if getattr(config.data, "scored", "val") != "val":
        raise ValueError("the sweep ranks by val, which its runs do not follow: add --data.scored=val")


def local(name: str, given: Mapping[str, str], extra: Sequence[str]) -> None:
    """Run a sweep with no server."""
    sweep, tree, path = read_sweep(name, given.get("program"))
    training = training_words(sweep, extra)
    for key in sorted({"run_dir", "resume", "runtime.device"} & arguments(training).keys()):
        where = "the arguments" if key in arguments(extra) else f"the command of {path}"
        raise ValueError(
            f"--{key} is the sweep's to give: remove it from {where} (there are --sweep_dir and --devices)"
        )
    experiment = importlib.import_module(sweep.program_module).EXPERIMENT
    words, data_path = experiment.resolve_data([*training, "--runtime.progress=false"])
    run = experiment.benchmark.parse(words)
    check_ranking(sweep, run.config)
    experiment.ready_data(run, data_path)
    if "runtime.track" not in arguments(extra):
        words.append("--runtime.track=none")
    words = command_words({**arguments(words), "data_path": data_path})
    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["auto"]
    devices = given["devices"].split(",") if "devices" in given else cuda
    directory = Path(given.get("sweep_dir") or f"runs/sweeps/{path.stem}-{data_path.stem}")
    seed, workers = _number(given, "sweep_seed", 0, 0) or 0, _number(given, "workers", len(devices)) or 1
    num_processes, count = _number(given, "np", 1) or 1, _number(given, "count", None)
    with alone(directory):
        LocalSweep(
            sweep,
            tree,
            words,
            directory,
            seed=seed,
            workers=workers,
            devices=devices,
            num_processes=num_processes,
            count=count,
        ).run()


def with_wandb(name: str, given: Mapping[str, str], extra: Sequence[str]) -> None:
    """Register a sweep with wandb, or join one, and work on it as wandb's agent."""
    for key in given.keys() - {"local", "count", "program"}:
        raise ValueError(f"--{key} is for local sweeps: add --local true (LOCAL=1), or remove it")
    joined = SWEEP_ID.fullmatch(name) and not Path(name).exists()
    if not joined:
        sweep, tree, path = read_sweep(name, given.get("program"))
        words = training_words(sweep, extra)
        if "run_dir" not in arguments(words):
            extra = [*extra, f"--run_dir=runs/sweeps/{sweep.name or path.stem}/{{digest}}"]
        point = (sweep.grid() if sweep.method == "grid" else [sweep.point(sweep.random_unit(0, 0, 0))])[0]
        experiment = importlib.import_module(sweep.program_module).EXPERIMENT
        check_ranking(sweep, experiment.benchmark.parse(words).config)
        resolved(sweep.program_module, words, point)  # an unknown key is told of here, and not by every trial
        place = sweep.command.index("${args}")
        tree = {**tree, "command": [*sweep.command[:place], *extra, *sweep.command[place:]]}
    elif words := [word for word in extra if not word.startswith("--data_path=")]:  # which make always gives
        raise ValueError(f"the arguments of sweep {name} stand in its command at wandb: remove {words[0]}")
    if not has_wandb_key():
        raise ValueError(
            "no wandb key was found: run wandb login, or sweep without it: LOCAL=1 (--local true)"
        )
    import wandb

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        sweep_id = (
            name if joined else wandb.sweep(tree, entity=tree.get("entity"), project=tree.get("project"))
        )
        wandb.agent(sweep_id, count=_number(given, "count", None))
    except (wandb.Error, ValueError) as fault:
        raise OSError(
            f"wandb cannot run the sweep: {fault}; LOCAL=1 (--local true) needs no server"
        ) from fault


def main(argv: Sequence[str]) -> None:
    """Parse, then one of the two."""
    if not argv or {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    name, *rest = argv
    if name.startswith("--"):
        raise ValueError(f"the sweep comes first: python -m benchmarks.sweep NAME_OR_YAML {name} ...")
    given = arguments(rest)
    extra = [word for key, value in given.items() if key not in OWN for word in [f"--{key}={value}"]]
    own = {key: value for key, value in given.items() if key in OWN}
    wants_local = own.get("local", "false").lower()
    if wants_local not in ("true", "false", "0", "1"):
        raise ValueError(f"--local is {wants_local!r}: choose true or false")
    (local if wants_local in ("true", "1") else with_wandb)(name, own, extra)
