#!/bin/bash
@sbatch@

# The site's own lines: setup: in its file in configs/clusters.
@setup@
set +eu  # one of them may have set -e, which would end this script with training, before the job can be requeued

project=@project@
logs=@logs@
python=@python@
limits=(@limits@)
@run@

@environment@
# In front of what the user's environment or a site's module has in it.
export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}"
# Less memory is lost to fragmentation; the user's own setting stays, under this name or its older one.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"
export PYTORCH_CUDA_ALLOC_CONF="$PYTORCH_ALLOC_CONF"

# Without its own code the job would find the project's, as it is today, where Python has that installed.
if ! cd "$project" || [ ! -e slurm/node/start.py ] || [ ! -e src/cli.py ]; then
  echo "the code of this job is gone from $project: submit the run anew with submit.py --name" >&2
  exit @bad_input@
fi
# Where the ranks meet, or `exit` where there is nothing to do.
found=$("$python" -m slurm.node.start @options@ "${limits[@]}" "$RUN_ROOT/$run") || exit
eval "$found"
@guard@

srun --unbuffered --output=@output@ --cpus-per-task=@cpus@ --kill-on-bad-exit=1 --wait=@wait@ \
  @program@ -u -m src.cli "${arguments[@]}"
code=$?
[ -z "$guard" ] || kill "$guard" 2>/dev/null

# Requeues the job, or prints the exit code that it ends with; not by other code, should the job's own be gone by now.
ended=$([ -e slurm/node/start.py ] && "$python" -m slurm.node.start --ended "$code" "${limits[@]}" --logs "$logs" "$RUN_ROOT/$run")
if [ -z "$ended" ] && [ -e "$RUN_ROOT/$run/STOPPED" ]; then
  echo "saved, and not requeued, as slurm/node/start.py failed: python slurm/jobs.py resume $run resumes it" >&2
  ended=@stopped@
fi
exit "${ended:-$code}"
