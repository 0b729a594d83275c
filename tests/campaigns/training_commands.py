"""Every training command of the pages and of the settings' heads, trained for a round on the embedded data.

    python -m tests.campaigns.training_commands [--only WORD] [--output F.json]

`tests.test_commands` has every command read by its program; here training commands run to their results, in
processes of their own, with the embedded data set in place of theirs and one round or epoch in place of all.
A file that a command reads from another's ``--run_dir`` is that of its run before, in this call.
Prints a line for each, and ends with 1 if any failed. With ``--output`` it goes on after a stop: commands
whose success stands in the file are not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.core.experiment import Experiment
from dataset.files import imported, write_json
from tests.launching import environment, warmly
from tests.shown import ROOT, commands
from tests.test_commands import CONFIGS, PAGES, programs

REPLACED = ("data_path", "run_dir", "weights", "extend", "resume", "model.keep_head")
"""Options that name files of the reader's own, or are about what is in them."""
MANY_CLIENTS = re.compile(r"-clients-\d{3,}")
"""In a partition's name: more clients than the embedded data set has images for."""
FITTED = (
    (r"set federated.num_rounds to (?:a multiple of )?(\d+)", "federated.num_rounds", ""),
    (r"server.warmup_rounds is \d+, but must be below", "server.warmup_rounds", "0"),
    (r"cohort_size is \d+, but there are only (\d+)", "federated.cohort_size", ""),
    (r"set model.trained to head", "model.trained", "head"),
    (r"has no partition 'alpha-", "data.partition", "lda-0.5-clients-10-seed-0"),
)
"""What a refusal says where one round or the embedded data set are too little for a command, the key that is
then set, and its value; empty: the number in the refusal."""
LIMIT_S = 900


def training_commands(folder: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Where each training command stands, its module and its words, each pair once."""
    seen = set()
    heads = ((path, path.read_text().partition("\nsetting:")[0]) for path in CONFIGS)
    shown = [(page, page.read_text()) for page in PAGES]
    for path, head in heads:
        found = re.search(r"^# Command: (.*(?:\\\n# .*)*)", head, re.MULTILINE)
        if found:
            shown.append((path, "```sh\n" + found[1].replace("\n# ", "\n") + "\n```\n"))
    for path, text in shown:
        for command in commands(text):
            if command.words[:2] == ("python", "-c") or (command.is_mention and "..." in command.line):
                continue
            for module, words in programs(command.words, folder):
                if (
                    module.startswith("benchmarks.")
                    and module.endswith(".train")
                    and "published" not in module
                ):
                    key = module, tuple(words)
                    if key not in seen and not {"--help", "-h", "NAME", "F"} & set(words):
                        seen.add(key)
                        yield path.relative_to(ROOT).as_posix(), module, tuple(words)


def short(
    module: str, words: Sequence[str], fitted: Mapping[str, str], run_dir: Path, made: Mapping[str, Path]
) -> list[str]:
    """The command's words for one round on the embedded data set, with some ``fitted`` keys."""
    experiment: type[Experiment[Any]] = imported(module).EXPERIMENT
    given = experiment.benchmark.words(words)
    for named, path in made.items():
        given = {key: value.replace(f"{named}/", f"{path}/") for key, value in given.items()}
    kept = [
        f"--{key}={MANY_CLIENTS.sub('-clients-10', str(value))}"
        for key, value in given.items()
        if key not in REPLACED and key not in fitted
    ]
    kept += [f"--{key}={value}" for key, value in fitted.items() if key != "federated.num_rounds"]
    resolved, _ = experiment.resolve_data(kept)
    config = experiment.benchmark.parse(resolved).config
    if config.mode == "centralised":
        length = ["--centralised.num_epochs=1", "--centralised.warmup_epochs=0"]
    else:
        length = [f"--federated.num_rounds={fitted.get('federated.num_rounds', '1')}"]
    return [*kept, *length, f"--run_dir={run_dir}", "--runtime.threads=1", "--runtime.progress=false"]


def outcome(module: str, words: Sequence[str], folder: Path, made: dict[str, Path]) -> tuple[int, str]:
    """The exit code of a command and its last line. ``made``: the run of each ``--run_dir`` so far."""
    fitted: dict[str, str] = {}
    while True:
        try:
            run_dir = folder / f"run{len(fitted)}"
            shortened = short(module, words, fitted, run_dir, made)
            done = subprocess.run(
                warmly(module, *shortened), cwd=ROOT, env=environment(WANDB_MODE="offline"),
                capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            code, said = done.returncode, (done.stderr if done.returncode else done.stdout).strip()
        except subprocess.TimeoutExpired:
            return 124, f"did not end within {LIMIT_S} s"
        except ValueError as fault:
            code, said = 2, str(fault)
        for pattern, key, value in FITTED:
            refusal = re.search(pattern, said) if code else None
            if refusal and key not in fitted:
                fitted[key] = value or refusal[1]
                break
        else:
            if not code and (named := dict(pairwise(words)).get("--run_dir")):
                made[named] = run_dir
            return code, said.rpartition("\n")[2]


def main(argv: Sequence[str]) -> int:
    """Run them all; the number of failures decides the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.training_commands", description=__doc__)
    parser.add_argument("--only", default="", help="only commands that contain this")
    parser.add_argument("--output", type=Path, help="JSON with the outcome of each, from which to go on")
    options = parser.parse_args(argv)
    kept = json.loads(options.output.read_text()) if options.output and options.output.exists() else []
    found: dict[str, dict[str, Any]] = {each["command"]: each for each in kept}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made: dict[str, Path] = {}
        listed = list(training_commands(folder))
        chosen = [each for each in listed if options.only in " ".join((each[0], each[1], *each[2]))]
        for number, (place, module, words) in enumerate(chosen):
            line = f"python -m {module} {' '.join(words)}"
            if line in found and not found[line]["code"]:
                continue
            begin = time.monotonic()
            run = folder / str(number)
            run.mkdir()
            code, said = outcome(module, words, run, made)
            seconds = round(time.monotonic() - begin)
            print(f"{number + 1}/{len(chosen)} {code} {seconds:4} s  {place}: {line}", flush=True)
            if code:
                print(f"    {said}", flush=True)
            found[line] = {"place": place, "command": line, "code": code, "seconds": seconds, "said": said}
            if options.output:
                write_json(options.output, list(found.values()))
    asked = {f"python -m {module} {' '.join(words)}" for _, module, words in chosen}
    failed = sum(found[line]["code"] != 0 for line in asked)
    print(f"{len(asked)} training commands, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
