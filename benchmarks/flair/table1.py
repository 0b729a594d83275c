"""Run Table 1, settings x seeds, each in a process of its own, then report and draw the figures.

    python -m benchmarks.flair.table1 [--settings fl-r-17 ...] [--seeds 0 1 ...] [--scale mini] [-- ...]

What is finished is skipped and what is half done goes on, so the same command is the way to go on after a
stop. A run that fails is named, its log kept, and the others go on. What stands after ``--`` goes to every
run. The table lies in the runs' directory, the figures in its folder ``figures``. ``--scale mini``: all
twelve rows and two seeds on the embedded mini set at the scale *tiny*, about ten minutes on a free core.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.core.commands import command_parser
from benchmarks.core.config.digests import tree_digest
from benchmarks.core.config.effects import idle_by_mode, reason_for, reasons
from benchmarks.core.config.trees import read_yaml
from benchmarks.core.mini import MINI_FILE
from benchmarks.core.network import network_words
from benchmarks.core.run_directory import run_differences
from benchmarks.flair import figures, paper, report
from benchmarks.flair.config import FLAIR, parse
from benchmarks.flair.standin import main as make_standin
from benchmarks.flair.train import Flair
from benchmarks.reporting.runs import DAMAGE
from dataset.cli import run as run_command

STANDIN = Path("data/standin.safetensors")
FINE = "-f-"
"""The part of a setting's name that marks fine-tuning."""
TELL_S = 60.0
"""Seconds between lines that say how far a run is."""


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    name: str
    argv: tuple[str, ...]
    directory: Path
    steps: int
    federated: bool

    @property
    def done(self) -> bool:
        """Whether it has ended, with results.

        Raises:
            ValueError: when the directory holds the results of another config.
        """
        path = self.directory / "results.json"
        if not path.is_file():
            return False
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["config_sha256"]
        except DAMAGE as fault:
            raise ValueError(f"{path} is damaged: remove {self.directory} to make the run again") from fault
        run = parse(self.argv)
        try:
            known = read_yaml(self.directory / "config.yaml")
        except (ValueError, OSError):
            known = {}
        if found != tree_digest(known) or run_differences(known, run):
            raise ValueError(f"{self.directory} holds a run of another config: choose another --runs_dir")
        return True

    def step(self) -> int:
        """How many rounds or epochs ``metrics.jsonl`` tells of."""
        try:
            lines = (self.directory / "metrics.jsonl").read_bytes().splitlines()
            return 1 + int(json.loads(lines[-1])["round" if self.federated else "epoch"]) if lines else 0
        except DAMAGE:
            return 0


def words_for(setting: str, common: Sequence[str]) -> list[str]:
    """The arguments of all runs without those that are for rows of the other mode than this one."""
    other = reasons(iter([idle_by_mode(parse(("--config", setting)).config.mode)]))
    asked = FLAIR.words(common)
    return [f"--{key}={value}" for key, value in asked.items() if reason_for(key, other) is None]


def jobs(
    settings: Sequence[str],
    seeds: Sequence[int],
    root: Path,
    common: Sequence[str],
    start: Sequence[str] = (),
) -> list[Job]:
    """Every setting with the first seed, then with the second, ...: an early stop leaves a whole table.

    ``start``: arguments of the fine-tuning rows alone: their weights, or the network of all of them.

    Raises:
        ValueError: for a setting that is not shipped or an argument that no run could take.
    """
    out = []
    for seed, setting in itertools.product(seeds, settings):
        directory = root / f"{setting}-seed{seed}"
        argv = ["--config", setting, "--seed", str(seed), *words_for(setting, common)]
        argv += start if FINE in setting else ()
        config = parse(argv).config
        name, words = f"{setting} seed {seed}", (*argv, "--run_dir", str(directory))
        out.append(Job(name, words, directory, config.num_steps, config.mode == "federated"))
    return out


def network_for(fine: Sequence[str], seeds: Sequence[int], root: Path, common: Sequence[str]) -> list[str]:
    """The arguments that give all fine-tuning rows one network: that of a run which has begun, if one has.

    Raises:
        ValueError: when there are no weights for it.
    """
    directories = [root / f"{setting}-seed{seed}" for seed, setting in itertools.product(seeds, fine)]
    argv = ["--config", fine[0], *words_for(fine[0], common)]
    return network_words(FLAIR, argv, lambda _: directories)


def execute(job: Job, log: Path, tell: str) -> int:
    """Run one job to its end, telling how far it is about once a minute; its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started, unit = time.monotonic(), "round" if job.federated else "epoch"
    with log.open("ab") as output:
        command = [sys.executable, "-m", "benchmarks.flair.train", *job.argv]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    return process.wait(TELL_S)
                except subprocess.TimeoutExpired:
                    far = f"{unit} {min(job.step(), job.steps)} of {job.steps}"
                    print(f"{tell}: {far}, {time.monotonic() - started:.0f} s", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def eta(todo: Sequence[Job], seconds: dict[bool, list[float]]) -> str:
    """About how long the jobs still to be made will take, from those of their kind that were made."""
    everything = [second for kind in seconds.values() for second in kind]
    if not everything:
        return "time left not known yet"
    left = sum(fmean(seconds[job.federated] or everything) for job in todo)
    return f"about {left / 60:.0f} min left" if left < 7200 else f"about {left / 3600:.1f} h left"


def make_runs(todo: Sequence[Job], logs: Path) -> list[str]:
    """Make every run; what failed, one line each."""
    failures: list[str] = []
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number, job in enumerate(todo):
        tell = f"[{number + 1}/{len(todo)}] {job.name}"
        print(f"{tell}: {eta(todo[number:], seconds)}", flush=True)
        started, log = time.monotonic(), logs / f"{job.directory.name}.log"
        code = execute(job, log, tell)
        if code == 0 and job.done:
            seconds[job.federated].append(time.monotonic() - started)
            continue
        text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        why = next((line for line in reversed(text) if line.strip()), "no output")
        failures.append(f"{job.name} failed with code {code}: {why} (see {log})")
        print(failures[-1], flush=True)
    return failures


def asked_for(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The options of this command, with their defaults, and the arguments for every run."""
    words = list(argv)
    extra = words[words.index("--") + 1 :] if "--" in words else []
    parser = command_parser("flair.table1", main.__doc__)
    parser.add_argument("--settings", nargs="+", help="default: all twelve")
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="default: 0 1 2 3 4, as the paper; 0 1 at scale mini"
    )
    parser.add_argument("--scale", help=f"none, or mini, or one of train's: {', '.join(FLAIR.scales)}")
    parser.add_argument("--data_path", help="HDF5 file, or the word mini")
    parser.add_argument("--weights", help="a file for the fine-tuning rows, or the word standin: makes one")
    parser.add_argument("--runs_dir", type=Path, help="default: runs/table1-DATA-SCALE")
    parser.add_argument("--verify", action="store_true", help="as benchmarks.flair.report")
    options = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    laptop = options.scale == "mini"
    if laptop:  # the mini set, at train's scale tiny
        options.data_path, options.scale = options.data_path or "mini", "tiny"
    if options.seeds is None:
        options.seeds = list(range(2 if laptop else 5))
    if min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
        raise ValueError(f"--seeds {' '.join(map(str, options.seeds))}: give different numbers from 0 on")
    if options.weights not in (None, "standin") and not Path(options.weights).is_file():
        raise ValueError(f"--weights {options.weights}: no such file; the word standin makes a stand-in")
    options.settings = [name.lower() for name in options.settings or paper.settings()]
    for setting in options.settings:
        FLAIR.path(setting)
    return options, extra


def runs_dir(options: Namespace, extra: Sequence[str], file: Path) -> Path:
    """The folder of the runs, named by data, scale and all else that changes them."""
    given: Path | None = options.runs_dir
    if given is not None:
        return given
    place = ("mini", options.scale or "mini") if file == MINI_FILE else (file.stem, options.scale or "full")
    words = FLAIR.words(extra).items()
    changes = [f"-{key}={value}" for key, value in words if not key.startswith("runtime.")]
    return Path("runs") / ("-".join(("table1", *place)) + "".join(changes)).replace("/", "_")


def main(argv: Sequence[str]) -> None:
    """Run the rows of Table 1, skipping what is done, report, and draw the figures."""
    options, extra = asked_for(argv)
    on = [f"--{key}={value}" for key in ("scale", "data_path") if (value := getattr(options, key))]
    on, file = Flair.resolve_data(on)
    common = ["--evaluation.per_user=true", *on, *extra]  # for Figure 5
    root, settings, seeds = runs_dir(options, extra, file), options.settings, options.seeds
    fine = [setting for setting in settings if FINE in setting]
    weights = options.weights
    if weights == "standin":
        weights = str(STANDIN)
        if not STANDIN.is_file() and fine:
            print(f"making the stand-in for ImageNet weights, {STANDIN}", flush=True)
            make_standin(["--output_file", weights])
    start = [] if weights is None else [f"--weights={weights}"]
    jobs(settings, seeds, root, common, start)  # refuses wrong arguments
    if weights is None and fine:
        try:
            start = network_for(fine, seeds, root, common)
        except ValueError as fault:
            print(f"the fine-tuning (F) rows are left out: {fault}, or with --weights standin", flush=True)
            settings = [setting for setting in settings if setting not in fine]
    todo = [job for job in jobs(settings, seeds, root, common, start) if not job.done]
    Flair.ready_data(parse(on), file)
    print(f"{len(todo)} runs to make of {len(settings) * len(seeds)}, into {root}", flush=True)
    failures = make_runs(todo, root / "logs")
    written = report.write([root], root)
    if written.rows:
        figures.main([str(root), f"--data_path={file}", f"--output_dir={root / 'figures'}"])
    if options.verify and written.rows:
        report.verify(written)
    if failures:
        raise ValueError(f"{len(failures)} of {len(todo)} runs failed; the first: {failures[0]}")


if __name__ == "__main__":
    sys.exit(run_command(main))
