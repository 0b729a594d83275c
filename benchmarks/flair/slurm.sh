#!/bin/bash
# Federated training on several machines under Slurm: one torchrun a machine, one worker a GPU.
#
#   sbatch --nodes=2 --gpus-per-node=8 benchmarks/flair/slurm.sh --config fl-r-17 --data_path data/flair.hdf5
#
# The checkout and the data file must be readable on every machine; only worker 0 writes. Five minutes before
# the time is up Slurm sends SIGTERM, which torchrun hands on: workers finish their round and save it. After
# that, or after a lost machine (which Slurm queues again by itself), the same run directory goes on:
#
#   sbatch ... benchmarks/flair/slurm.sh --config fl-r-17 --data_path data/flair.hdf5 --run_dir runs/slurm-JOBID
#SBATCH --job-name=flair
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu
cd "${SLURM_SUBMIT_DIR:-.}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Later words win, so a --run_dir among the arguments is the one.
exec srun --kill-on-bad-exit=1 .venv/bin/torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint="$first:29500" \
  -m benchmarks.flair.train --run_dir "runs/slurm-$SLURM_JOB_ID" "$@"
