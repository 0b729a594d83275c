"""slurm.sh by stubs of srun and scontrol that start the tasks here: what each gets, a job that goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dataset.flair.mini import write_mini
from tests import warm
from tests.benchmarks.conftest import SMALL, TINY
from tests.launching import ROOT, environment, fresh_environment

SCRIPT = ROOT / "slurm.sh"
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
open("srun", "a").write(" ".join(words) + "\\n")
while words[0].startswith("--"):
    words.pop(0)
size = int(os.environ["SLURM_NTASKS"])
local = int(os.environ.get("SLURM_NTASKS_PER_NODE", size))
tasks = []
for rank in range(size):
    own = dict(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % local))
    own["SLURM_STEP_TASKS_PER_NODE"] = str(local) + (f"(x{{size // local}})" if size > local else "")
    tasks.append(subprocess.Popen(words, env={{**os.environ, **own}}))
open("pids", "w").write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
"""Ends with the highest code of its tasks, as srun does."""
SCONTROL = """#!/bin/sh
case $1 in
  show) [ "$*" = "show hostnames one,two" ] && printf 'one\\ntwo\\n' ;;
  *) echo "$*" >> scontrol ;;
esac
"""
TASK = """#!/bin/sh
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" > "task-$RANK"
[ -z "$CANCEL" ] || kill -TERM "$BATCH"
exit "${CODE:-0}"
"""
WARM = f"""#!/bin/sh
shift
exec {sys.executable} {warm.__file__} "$@"
"""
"""``python -m``, without the seconds of imports."""


def submitted(folder: Path, python: str, **more: str) -> dict[str, str]:
    """The environment of job 40007 in a folder whose .venv has this Python."""
    programs = {"srun": SRUN, "scontrol": SCONTROL}
    for name, text in {**programs, ".venv/bin/python": python}.items():
        path = folder / ("bin/" + name if name in programs else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "one,two", "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    return {**job, **more}


def ended(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The batch script to its end, each task a stub; as the process BATCH."""
    own = {**fresh_environment(), **submitted(folder, TASK, **more)}
    command = ["bash", "-c", 'export BATCH=$$; exec bash "$@"', "bash", str(SCRIPT), *words]
    return subprocess.run(command, env=own, cwd="/", capture_output=True, text=True, timeout=60)


def requeued(folder: Path) -> bool:
    path = folder / "scontrol"
    return path.exists() and path.read_text() == "requeue 40007\n"


def test_each_task_is_a_worker_of_one_job(tmp_path: Path) -> None:
    done = ended(tmp_path, "--config", "fl-r-17", "--seed=1", SLURM_GPUS_ON_NODE="2", SLURM_CPUS_PER_TASK="3")
    assert (done.returncode, done.stderr) == (0, "")
    words = "-m benchmarks.flair.train --run_dir runs/slurm-40007 --config fl-r-17 --seed=1\n"
    for rank in range(4):
        expected = f"{rank} {rank % 2} 4 2 one 20007 {words}"
        assert (tmp_path / f"task-{rank}").read_text() == expected
    assert not requeued(tmp_path)
    assert (tmp_path / "srun").read_text().startswith("--kill-on-bad-exit=0 --wait=300 bash -c ")


def test_a_job_of_an_array_trains_the_seed_of_its_number(tmp_path: Path) -> None:
    one = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_ARRAY_TASK_ID": "2"}
    assert ended(tmp_path, "--config", "fl-r-17", **one).returncode == 0
    assert "--run_dir runs/slurm-40007 --seed 2 --config fl-r-17\n" in (tmp_path / "task-0").read_text()


def test_variables_say_where_data_and_run_lie_and_later_words_win(tmp_path: Path) -> None:
    places = {"DATA": "/d a/f.hdf5", "RUN_DIR": "/r", "MODULE": "benchmarks.fedcv.detection.train"}
    done = ended(tmp_path, "--data_path=/e", **places, RDZV="three:7", SLURM_NTASKS="1")
    assert done.returncode == 0, done.stderr
    words = "-m benchmarks.fedcv.detection.train --run_dir /r --data_path /d a/f.hdf5 --data_path=/e\n"
    assert (tmp_path / "task-0").read_text() == f"0 0 1 2 three 7 {words}"


@pytest.mark.parametrize(
    ("more", "code", "again", "said"),
    [
        ({"CODE": "75"}, 75, True, "queueing job 40007 again, which goes on from here\n"),
        ({"CODE": "75", "SLURM_RESTART_COUNT": "4"}, 75, True, "queueing job 40007 again"),
        (
            {"CODE": "75", "SLURM_RESTART_COUNT": "5", "REQUEUES": "5"},
            75,
            False,
            "RUN_DIR=runs/slurm-40007 sbatch",
        ),
        ({"CODE": "75", "CANCEL": "1"}, 75, False, ""),
        ({"CODE": "2"}, 2, False, ""),
        ({"CODE": "0"}, 0, False, ""),
    ],
)
def test_a_job_is_queued_again_when_it_was_stopped_and_no_one_cancelled_it(
    more: dict[str, str], code: int, again: bool, said: str, tmp_path: Path
) -> None:
    done = ended(tmp_path, **more)
    assert (done.returncode, requeued(tmp_path)) == (code, again)
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "this is a job for Slurm: sbatch "),
        ({"PYTHON": "none/python"}, "there is no none/python in "),
        ({"SLURM_GPUS_ON_NODE": "8"}, "8 GPUs and 2 tasks on a machine"),
    ],
)
def test_what_cannot_be_is_one_line(more: dict[str, str], said: str, tmp_path: Path) -> None:
    done = ended(tmp_path, **more)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "srun").exists()


def test_slurm_finds_its_directives_before_the_first_command() -> None:
    head = SCRIPT.read_text().partition("\nset -eu")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert all(line.startswith("#") for line in head)
    directives = [line.split()[1] for line in head if line.startswith("#SBATCH")]
    assert {"--signal=USR1@300", "--requeue", "--open-mode=append"} <= set(directives)


def test_two_workers_are_stopped_queued_again_and_go_on(tmp_path: Path) -> None:
    """The real training: SIGTERM, as at a preemption, to both tasks; a second start ends the run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run, rounds = tmp_path / "runs" / "slurm-40007", 60
    mini_file = tmp_path / "tiny.hdf5"
    write_mini(mini_file, TINY)
    own = submitted(tmp_path, WARM, SLURM_NTASKS="2", DATA=str(mini_file), RDZV=f"localhost:{port}")
    own["PATH"] = f"{tmp_path / 'bin'}:{environment()['PATH']}"
    words = ["bash", str(SCRIPT), "--config=fl-r-17", *SMALL, f"--federated.num_rounds={rounds}"]
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(words, env=environment(**own), stdout=log, stderr=log)
    history = run / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 300
        while not (history.exists() and history.read_text()) and job.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for pid in (tmp_path / "pids").read_text().split():
            os.kill(int(pid), signal.SIGTERM)
        assert job.wait(300) == 75, (tmp_path / "log").read_text()
    finally:
        job.kill()
        job.wait()
        log.close()
    said = (tmp_path / "log").read_text()
    assert "2 workers" in said
    found = re.search(r"stopped by SIGTERM, (\d+) of 60 rounds are done and ", said)
    assert found is not None
    assert len(history.read_text().splitlines()) == int(found[1]) < rounds
    assert requeued(tmp_path)
    again = subprocess.run(
        words, env=environment(**own, SLURM_RESTART_COUNT="1"), capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    assert [json.loads(line)["round"] for line in history.read_text().splitlines()] == list(range(rounds + 1))
    assert json.loads((run / "results.json").read_text())["rounds"] == rounds
