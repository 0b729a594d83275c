#!/bin/bash
# Training on several machines under Slurm: one task a worker, one worker a GPU.
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=4 slurm.sh --config fl-r-17
#
# It is submitted from the checkout, after make setup; checkout, data and run directory must be readable on every
# machine, and only worker 0 writes. Variables, with what they are without being given:
#
#   MODULE=benchmarks.flair.train     what is run: also benchmarks.visual_classification.train, benchmarks.fedcv...
#   DATA=                             the data file; without it data/flair.hdf5, or else the mini set
#   RUN_DIR=runs/slurm-JOBID          where the run is kept and goes on
#   PYTHON=.venv/bin/python           of the environment with torch, the same path on every machine
#   RDZV=FIRST_MACHINE:PORT           where workers meet; the port is drawn from the job's number
#   REQUEUES=100                      how often the job is queued again at most
#
# A job of an array trains the seed of its number, on a GPU of its own:
#
#   DATA=data/cifar10.hdf5 MODULE=benchmarks.visual_classification.train sbatch --array=0-2 --gpus=1 slurm.sh --config cifar10-fedavg
#
# Five minutes before the time is up (--signal) or when the job is preempted with a grace time (SIGTERM), workers
# finish their round, save it and exit with 75. The job is then queued again, under the same number and with the
# same run directory, and goes on. A round must take less than these minutes: sbatch --signal=USR1@900 gives more.
# A job that is cancelled is not queued again; after a lost machine, or a preemption without grace, Slurm does it.
#SBATCH --job-name=federated
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu

refuse() {
  echo "error: $1" >&2
  exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || refuse "this is a job for Slurm: sbatch --nodes=2 --ntasks-per-node=8 slurm.sh ..."
cd "${SLURM_SUBMIT_DIR:-.}"
MODULE=${MODULE:-benchmarks.flair.train}
RUN_DIR=${RUN_DIR:-runs/slurm-$SLURM_JOB_ID}
PYTHON=${PYTHON:-.venv/bin/python}
command -v "$PYTHON" > /dev/null || refuse "there is no $PYTHON in $PWD: run make setup there, or name one by PYTHON="
tasks=${SLURM_NTASKS_PER_NODE:-${SLURM_NTASKS:-1}} gpus=${SLURM_GPUS_ON_NODE:-0}
[ "$gpus" -le "$tasks" ] \
  || refuse "$gpus GPUs and $tasks tasks on a machine, and a worker uses one GPU: sbatch --ntasks-per-node=$gpus ..."
if [ -z "${RDZV:-}" ]; then
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  RDZV=${first:-localhost}:$((20000 + SLURM_JOB_ID % 20000))
fi
export MASTER_ADDR="${RDZV%:*}" MASTER_PORT="${RDZV##*:}"
# Since Slurm 22.05 srun does not take this from sbatch by itself.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# Slurm signals the tasks themselves; the shell gets SIGTERM only where the job is over for Slurm, as by scancel.
cancelled=
trap 'cancelled=1' TERM

# What torchrun would set, from each task's own variables. No --kill-on-bad-exit: workers that stop leave one by
# one, and one that is lost ends the others by the watchdog.
# shellcheck disable=SC2016  # each task expands it
worker='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[!0-9]*}
export LOCAL_WORLD_SIZE
exec "$@"'
code=0
# Later words win, so a --run_dir or --data_path among the arguments is the one.
srun --kill-on-bad-exit=0 --wait=300 bash -c "$worker" worker "$PYTHON" -m "$MODULE" \
  --run_dir "$RUN_DIR" ${DATA:+--data_path "$DATA"} ${SLURM_ARRAY_TASK_ID:+--seed "$SLURM_ARRAY_TASK_ID"} "$@" || code=$?

if [ "$code" -eq 75 ] && [ -z "$cancelled" ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${REQUEUES:-100}" ]; then
    echo "this job was queued again $SLURM_RESTART_COUNT times already (REQUEUES); RUN_DIR=$RUN_DIR sbatch ... goes on" >&2
  else
    echo "queueing job $SLURM_JOB_ID again, which goes on from here" >&2
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
