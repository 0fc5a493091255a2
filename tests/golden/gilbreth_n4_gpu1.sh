#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --comment=0123abcd.0
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --job-name=gpt
#SBATCH --mem=50G
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/runs/gpt/slurm/%j_batch.out
#SBATCH --partition=a100-80gb
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=2-00:00:00

# setup
export RUN_ROOT=/scratch/me/runs
export PYTHONUNBUFFERED=1
export PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=8
export STOPPED_IS_READ=1
export STOP_LEAD_SECONDS=300
export NCCL_DEBUG=WARN
export PYTHONPATH=/scratch/me/runs/.snapshots/0123"${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"
export PYTORCH_CUDA_ALLOC_CONF="$PYTORCH_ALLOC_CONF"  # its older name
cd /scratch/me/runs/.snapshots/0123 || exit
python=/home/me/project/.venv/bin/python
run=gpt arguments=(fit --config configs/tasks/language.yaml --run gpt --trainer.devices 1)
limits=(--max-restarts 20 --max-crash-retries 2)
# Where to meet, or `exit 0` where there is nothing to do: slurm/job.py.
found=$("$python" -m slurm.job --tasks 4 "${limits[@]}" "$RUN_ROOT/$run") || exit
eval "$found"
"$python" -m slurm.guard --lead 300 "${limits[@]}" "$RUN_ROOT/$run" & guard=$!  # for steps that outlast the signal

# command
srun --unbuffered --output /scratch/me/runs/gpt/slurm/%j_%t_log.out --cpus-per-task=16 --kill-on-bad-exit=1 --wait=300 "$python" -u -m src.cli "${arguments[@]}"


# teardown
code=$?
kill $guard 2>/dev/null
# Requeues the job, or says what it ends with: slurm/requeue.py.
ended=$("$python" -m slurm.job --ended "$code" "${limits[@]}" --logs /scratch/me/runs/gpt/slurm "$RUN_ROOT/$run")
if [ -z "$ended" ] && [ -e "$RUN_ROOT/$run/STOPPED" ]; then
  echo "saved, and not requeued, as slurm/job.py failed: python slurm/jobs.py resume $run goes on" >&2
  ended=85
fi
exit "${ended:-$code}"