#!/bin/bash
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

# The site's own lines: setup: in its file in configs/clusters.
set +eu  # one of them may have set -e, which would end this script with training, before the job can be requeued

project=/scratch/me/runs/.snapshots/0123
logs=/scratch/me/runs/gpt/slurm
python=/home/me/project/.venv/bin/python
limits=(--max-restarts 20 --max-crash-retries 2)
run=gpt arguments=(fit --config configs/tasks/language.yaml --run gpt --trainer.devices 1)

export RUN_ROOT=/scratch/me/runs
export PYTHONUNBUFFERED=1
export PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=8
export STOPPED_IS_READ=1
export STOP_LEAD_SECONDS=300
export NCCL_DEBUG=WARN
# In front of what the user's environment or a site's module has in it.
export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}"
# Less memory is lost to fragmentation; the user's own setting stays, under this name or its older one.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"
export PYTORCH_CUDA_ALLOC_CONF="$PYTORCH_ALLOC_CONF"

# Without its own code the job would find the project's, as it is today, where Python has that installed.
if ! cd "$project" || [ ! -e slurm/node/start.py ] || [ ! -e src/cli.py ]; then
  echo "the code of this job is gone from $project: submit the run anew with submit.py --name" >&2
  exit 2
fi
# Where the ranks meet, or `exit` where there is nothing to do.
found=$("$python" -m slurm.node.start --tasks 4 "${limits[@]}" "$RUN_ROOT/$run") || exit
eval "$found"
"$python" -m slurm.node.guard --seconds 172800 --margin 30 "${limits[@]}" "$RUN_ROOT/$run" & guard=$!  # for steps that outlast the signal

srun --unbuffered --output=/scratch/me/runs/gpt/slurm/%j_%t_log.out --cpus-per-task=16 --kill-on-bad-exit=1 --wait=300 \
  "$python" -u -m src.cli "${arguments[@]}"
code=$?
[ -z "$guard" ] || kill "$guard" 2>/dev/null

# Requeues the job, or prints the exit code that it ends with; not by other code, should the job's own be gone by now.
ended=$([ -e slurm/node/start.py ] && "$python" -m slurm.node.start --ended "$code" "${limits[@]}" --logs "$logs" "$RUN_ROOT/$run")
if [ -z "$ended" ] && [ -e "$RUN_ROOT/$run/STOPPED" ]; then
  echo "saved, and not requeued, as slurm/node/start.py failed: python slurm/jobs.py resume $run resumes it" >&2
  ended=85
fi
exit "${ended:-$code}"
