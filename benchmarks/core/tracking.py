"""Showing a run on wandb or TensorBoard. ``metrics.jsonl`` is the source of truth; this is a copy of it.

A tracker gets the lines of ``metrics.jsonl`` and sends each step once, however often the run is killed and
resumed: ``tracking.json`` in the run directory holds the id of the wandb run and the last step sent. Nothing
that goes wrong in a tracker stops a run, nor is any key or environment variable written or sent.
"""

from __future__ import annotations

import contextlib
import json
import math
import netrc
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
from PIL import Image

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree
from benchmarks.reporting.tables import decimals_of, markdown_table
from dataset.files import needed, write_json
from pfl_ext.tasks.score_kinds import USUAL, ScoreKinds
from pfl_ext.workers.distributed import is_main

Rows = Mapping[str, Mapping[str, float]]
STATE = "tracking.json"
INIT_SECONDS, ROW_SECONDS, FINISH_SECONDS = 30, 5, 60
"""How long wandb may keep a run waiting: at its start, for a row in its file, for the upload at its end."""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a tree as ``section/key``; whatever is not a number is left out."""
    out: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            out[f"{prefix}{key}"] = value
    return out


def columns_of(rows: Rows) -> list[str]:
    """The columns of a final table that people read, in the order of its first row."""
    return [name for name in next(iter(rows.values())) if name != "loss" and "binned" not in name]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def has_wandb_key() -> bool:
    """Whether wandb would find a key, in the environment or in the user's netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host) is not None
    except (OSError, RuntimeError, netrc.NetrcParseError):  # RuntimeError: there is no home folder
        return False


class WandbBackend:
    """A wandb run, offline where there is no key. Under a sweep's agent its run id and project win."""

    def __init__(self, run: AnyRun, directory: Path, dataset: str, known_id: str | None) -> None:
        import wandb  # not at the top: it takes a second, and most runs do without

        self._wandb, self._artifact, runtime = wandb, run.runtime.artifact, run.runtime
        public = run.config.privacy is not None and run.config.privacy.release == "public"
        quiet: Tree = {"silent": True, "show_errors": False, "show_warnings": False}
        wandb.setup(settings=wandb.Settings(**quiet))
        self._run = wandb.init(
            project=runtime.project,
            entity=runtime.entity,
            name=runtime.name or directory.name,
            group=run.config.setting,
            id=os.environ.get("WANDB_RUN_ID") or known_id or secrets.token_hex(4),
            resume="allow",
            mode=None if os.environ.get("WANDB_MODE") or has_wandb_key() else "offline",
            dir=str(directory.resolve()),
            config={**asdict(run.config), "dataset": dataset, "run_dir": str(directory)},
            settings=wandb.Settings(
                **quiet,
                console="off",
                save_code=False,
                x_save_requirements=False,
                x_disable_stats=public,  # the machine's load depends on the cohorts and their images
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                x_transaction_log_flush_interval=0.02,
            ),
        )
        self.id: str = self._run.id
        """The run's id, the same after a resumption if the earlier steps are still there."""
        offline = f"offline, wandb sync {Path(self._run.dir).parent}"
        self.where = "disabled" if self._run.disabled else self._run.url or offline
        """The address of the run, or how to get at it, for people."""
        self.last = math.inf if self._run.offline else self._run.step - 1
        """The last step that a server answered to have of this run; infinity where there is none to ask."""
        self._file = Path(self._run.settings.sync_file)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row of wandb's history, in its file when this returns.

        ``log`` leaves the row to a thread of this process, and wandb's own process dies with this one,
        buffers and all: only the file outlives a SIGKILL. A disabled run (WANDB_MODE) has none.
        """
        if self._run.disabled:
            return
        size = _size(self._file)
        self._run.log(dict(values), step=step, commit=True)
        deadline = time.monotonic() + ROW_SECONDS
        while _size(self._file) <= size and time.monotonic() < deadline:
            time.sleep(0.005)

    def finish(self, step: int, results: Tree, rows: Rows, directory: Path) -> None:
        """Summary, tables, plots and, if asked for, the model."""
        wandb = self._wandb
        columns = columns_of(rows)
        images = {f"plots/{p.stem}": wandb.Image(str(p)) for p in sorted((directory / "plots").glob("*.png"))}
        data = [[name, *map(values.get, columns)] for name, values in rows.items()]
        tables = {"results": wandb.Table(columns=["row", *columns], data=data)}
        if "per_class_ap" in results:
            by_class = {"AP": results["per_class_ap"]}
            if "prevalence" in results:  # of multi-label runs; those of detection have none
                by_class["prevalence"] = results["prevalence"]
            classes = [[name, *(column[name] for column in by_class.values())] for name in by_class["AP"]]
            tables["per_class_ap"] = wandb.Table(columns=["label", *by_class], data=classes)
        self._run.log({**tables, **images}, step=step + 1)  # the last step's row is closed
        summary = flat({name: results.get(name) for name in ("val", "test", "best_step", "wall_clock_s")})
        self._run.summary.update({f"final/{name}": value for name, value in summary.items()})
        if self._artifact:
            kept = {name: results[name] for name in ("setting", "config_sha256", "model_sha256")}
            artifact = wandb.Artifact(f"model-{self.id}", "model", metadata=kept)
            artifact.add_file(str(directory / "model.safetensors"))
            self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Wait for the upload, a minute at most."""
        self._run.finish(exit_code=int(failed))


class TensorBoardBackend:
    """Event files under ``tensorboard/`` of the run directory."""

    def __init__(self, run: AnyRun, directory: Path, dataset: str, known_id: str | None) -> None:
        from tensorboardX import SummaryWriter

        self.id = known_id or secrets.token_hex(4)
        unique = f".{time.time_ns()}"  # its names are of seconds: a run that goes on at once has another file
        self._writer = SummaryWriter(str(directory / "tensorboard"), filename_suffix=unique)
        first = "" if find_spec("tensorboard") else " (after pip install tensorboard)"
        self.where = f"tensorboard --logdir {directory / 'tensorboard'}{first}"
        self.last = math.inf
        if known_id is None:
            config = json.dumps({**asdict(run.config), "dataset": dataset}, indent=1)
            self._writer.add_text("config", "    " + config.replace("\n", "\n    "), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve, on disk before this returns."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, step: int, results: Tree, rows: Rows, directory: Path) -> None:
        """The final table as text, and the plots."""
        columns = columns_of(rows)
        digits = decimals_of(rows.values(), columns, ScoreKinds.of(results) or USUAL)
        cells = [
            [name, *(f"{values[col]:.{n}f}" if col in values else "" for col, n in zip(columns, digits))]
            for name, values in rows.items()
        ]
        self._writer.add_text("results", markdown_table(["", *columns], cells), step)
        for path in sorted((directory / "plots").glob("*.png")):
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            self._writer.add_image(f"plots/{path.stem}", pixels, step, dataformats="HWC")

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()


Backend = WandbBackend | TensorBoardBackend
BACKENDS: Mapping[str, type[Backend]] = {"wandb": WandbBackend, "tensorboard": TensorBoardBackend}
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX"}


class Tracking(contextlib.AbstractContextManager["Tracking"]):
    """The tracker that ``runtime.track`` asks for, if it does, on the first worker: each step once, and one
    warning line instead of any exception.
    """

    def __init__(self, run: AnyRun, directory: Path, dataset: str, unit: str) -> None:
        self._name, self._unit, self._path = run.runtime.track, unit, directory / STATE
        self._directory = directory
        self._backend: Backend | None = None
        if self._name == "none" or not is_main():
            return
        needed(PACKAGES[self._name], self._name)
        with self._guard():
            states = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
            state = states.get(self._name, {})
            self._backend = BACKENDS[self._name](run, directory, dataset, state.get("id"))
            same = state.get("id") == self._backend.id
            self._sent: float = min(state["sent"], self._backend.last) if same else -1
            self._others = {name: kept for name, kept in states.items() if name != self._name}
            print(f"tracking: {self._name}, {self._backend.where}", file=sys.stderr)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as fault:  # whatever it is: the run goes on
            self._backend = None
            text = " ".join(f"{type(fault).__name__}: {fault}".split())
            print(f"WARNING: tracking by {self._name} failed and stops here: {text}", file=sys.stderr)

    def tell(self, line: Tree) -> None:
        """A line of ``metrics.jsonl``; sent unless it has been."""
        step = int(line[self._unit])
        if self._backend is None or step <= self._sent:
            return
        with self._guard():
            self._backend.log(step, flat({key: value for key, value in line.items() if key != self._unit}))
            self._sent = step
            write_json(self._path, {**self._others, self._name: {"id": self._backend.id, "sent": step}})

    def finish(self, results: Tree, rows: Rows) -> None:
        """The run has ended; ``rows``: its final table."""
        if self._backend is not None:
            with self._guard():
                self._backend.finish(int(results["rounds"]), results, rows, self._directory)

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        """This process has done with the run, whether it ended or was stopped."""
        self.close(kind is not None)

    def close(self, failed: bool) -> None:
        """Nothing more will come from this process."""
        if self._backend is not None:
            with self._guard():
                self._backend.close(failed)
