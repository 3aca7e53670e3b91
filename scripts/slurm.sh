#!/usr/bin/env bash
# One run on one or several nodes of eight GPUs, by Slurm. Everything behind the script's name is for `caddie`:
#
#     sbatch scripts/slurm.sh run baseline --data my_texts --out runs/wide
#     sbatch --nodes=2 scripts/slurm.sh run baseline train.micro_batches=16 --data my_texts --out runs/wide
#
# The working folder is shared by the nodes, and caddie installed in .venv there, or in the folder that VENV names.
#SBATCH --job-name=caddie
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.txt
set -euo pipefail

# Each node runs one task, which starts a process for each of its GPUs; the first node is where they meet.
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))

# shellcheck disable=SC2016  # SLURM_NODEID is the node's own
srun bash -c 'exec "$0" --node-rank="$SLURM_NODEID" "$@"' \
    "${VENV:-.venv}/bin/torchrun" --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${GPUS:-8}" \
    --master-addr="$first" --master-port="$port" -m caddie "$@"
