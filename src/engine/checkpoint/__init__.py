"""Checkpoints: `schedule` says when, `save` and `best` save, `write` writes, `choose` finds the one to resume from.

    python -m src.checkpoint list NAME      # also status, verify, rollback, export, diff

runs/<name>/checkpoints/step=00000500.ckpt    the newest states, and those kept for good
                        best-step=….ckpt      the best by `checkpoint.monitor`
                        shards/               the rows of each rank, where these are in parts (`shards`)
                        quarantine/           damaged ones, moved aside by a start that found them
                        tripped/              the state in which the circuit breaker stopped
                        unhealthy/            what was saved in the bad streak before that
                        rolled-back/          those that `rollback` took back

No start resumes from the last four, and nothing there is ever deleted. A file is a zip of tensors and plain
types that `torch.load(path, weights_only=True)` reads; under an fsdp strategy (`checkpoint.format`) its tensors are in
`shards/`, `shards.load` reads it whole, and `export` makes one file of its weights. Where an average of the weights is
kept (`callbacks/ema.py`), a file has it beside them, and evaluation and `export` take the average.

`--checkpoint.backup DIR` keeps a copy of the newest healthy state in DIR/<name>/. No start looks there:
where the run's own files are lost, `cp -r DIR/<name>/. runs/<name>/checkpoints/` puts it back.
"""
