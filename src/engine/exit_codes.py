"""Name the exit codes: how a command ended, as a number that schedulers, batch scripts and shell loops read.

| code | it ended because | another start |
|---|---|---|
| 0   | it is done, or stopped as asked (`max_time`); a run that was finished before, too | is not needed |
| 1   | something raised: the traceback says what; torchrun's end on any of these | by hand |
| 2   | the input is bad: one line says what would be allowed | ends the same |
| 65  | the run has checkpoints and none is whole, or it had some and all are gone | ends the same |
| 70  | the circuit breaker stopped a run whose metrics say that it is broken | ends the same |
| 71  | the memory of a device or of the host did not suffice, on this rank or another | ends the same |
| 74  | nothing happened for `watchdog.minutes`, on some rank | may succeed |
| 75  | somebody trains the run, or the disk cannot be read or written right now | later |
| 76  | another rank ended during a collective operation; its own code says why | by that |
| 85  | a signal asked it to stop: the state is saved, and STOPPED is in the run directory | resumes |
| 130 | Ctrl-C: in training the first saves as a signal does; any other leaves at once | by hand: it resumes |
| 137 | SIGKILL, by whomever | resumes from the newest checkpoint |
| 143 | SIGTERM where nothing is saved, as in an evaluation (129, 138, 140: SIGHUP, SIGUSR1, 2) | begins anew |

65 to 76 are those of sysexits.h whose meaning is nearest; 85 is Linux' ERESTART. Jobs of slurm/submit.py have them
too, but resume by themselves after a signal. Without PyTorch, as the launcher reads them.
"""

DONE = 0
CRASHED = 1
BAD_INPUT = 2
NO_CHECKPOINT = 65
TRIPPED = 70
OUT_OF_MEMORY = 71
HUNG = 74
BUSY = 75
LOST_A_RANK = 76
STOPPED = 85
INTERRUPTED = 130
KILLED = 137
TERMINATED = 143

# Ends that another start would repeat, in the words of a table.
WORDS = {
    CRASHED: "crashed",
    BAD_INPUT: "bad input",
    NO_CHECKPOINT: "no whole checkpoint",
    TRIPPED: "tripped",
    OUT_OF_MEMORY: "out of memory",
}
# After these another start, in a while, may get further than this one did.
AGAIN = (HUNG, BUSY, STOPPED, KILLED, TERMINATED)
