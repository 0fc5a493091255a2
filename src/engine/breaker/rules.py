"""Judge whether a run is broken: plain numbers in, a verdict out; every rank feeds it the same."""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from src.engine.errors import UserError

# What a step has beside its metrics; no logged name contains a space.
LOSS, GRADIENT, SKIPPED = "the loss", "the gradients", "a skipped step"
WINDOW = 100  # logged values behind a running median
LEAST = 10  # of them, before a value can be a spike

CALM = "a lower learning rate, gradient clipping (--trainer.gradient_clip_val 1.0{}), or the data of these steps"
ADVICE = {
    "nonfinite": CALM.format("; it mends no NaN"),
    "zero_or_constant": "what computes the metric (reward, labels, data), or the learning rate of a collapsed model",
    "spike": CALM.format(""),
    "fp16_skips": "--trainer.precision bf16-mixed or 32-true, or a lower learning rate",
}


@dataclass
class BreakerSettings:
    """When a run is stopped because its metrics say that it is broken.

    `zero_or_constant` and `spike` name metrics by their columns in metrics.csv and count *logged values*: steps for
    what is logged in each step, log intervals for train/loss and lr, validations for val/loss, epochs for what is
    logged once per epoch. Both are empty by default, as they need to know the metric: a loss that may be negative has
    no sensible "10 times its median", and a loss near 0 may rise tenfold for good when the data changes.

    Args:
        enabled: whether anything is watched at all
        steps: bad steps (or logged values) in a row that end the run
        warmup_steps: optimizer steps in which nothing counts
        nonfinite: NaN or Inf in the loss that training_step returns, or in the gradients at an optimizer step, is bad
        zero_or_constant: metrics that are bad while they are exactly 0 or exactly what they were before
        spike: metrics that are bad above spike_factor times the median of their last 100 good values
        spike_factor: see there
        fp16_skips: optimizer steps in a row that the fp16 loss scaler may skip; a few are its search for a scale

    """

    enabled: bool = True
    steps: int = 10
    warmup_steps: int = 0
    nonfinite: bool = True
    zero_or_constant: list[str] = field(default_factory=list)
    spike: list[str] = field(default_factory=list)
    spike_factor: float = 10.0
    fp16_skips: int = 20

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup_steps", 0), ("fp16_skips", 1)):
            if getattr(self, name) < least:
                raise UserError(f"breaker.{name} is {getattr(self, name)}; it must be at least {least}")
        if not 1 < self.spike_factor < math.inf:
            raise UserError(f"breaker.spike_factor is {self.spike_factor}; it must be a number above 1")

    @property
    def watched(self) -> list[str]:
        """Return the metrics that are named, each once."""
        return list(dict.fromkeys([*self.zero_or_constant, *self.spike]))


@dataclass
class Verdict:
    """Why a run is broken.

    Args:
        rule: nonfinite, zero_or_constant, spike or fp16_skips
        metric: what was bad
        value: its last value
        ranks: on which ranks
        first: the optimizer step (from 1) at which the streak began; the state of the step before is its last good one
        length: of the streak
        median: which a spike was compared with

    """

    rule: str
    metric: str
    value: float
    ranks: list[int]
    first: int
    length: int
    median: float | None = None

    def __str__(self) -> str:
        if self.rule == "nonfinite":
            return f"{self.metric} had NaN or Inf in {self.length} optimizer steps in a row (last: {self.value})"
        if self.rule == "fp16_skips":
            return f"the fp16 loss scaler skipped {self.length} optimizer steps in a row and finds no scale that works"
        if self.rule == "spike":
            above = "" if self.median is None else f", its median before was {self.median:.6g}"
            return f"{self.metric} spiked in {self.length} logged values in a row (last: {self.value:.6g}{above})"
        stuck = "was exactly 0" if self.value == 0 else f"stayed at {self.value!r}"
        return f"{self.metric} {stuck} in {self.length} logged values in a row"


class Judge:
    """Count streaks. Its state is plain types and goes into checkpoints, so that a resumed run keeps counting."""

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.verdict: Verdict | None = None
        self._series: dict[str, dict[str, Any]] = {}

    def feed(self, step: int, by_rank: list[dict[str, float]]) -> None:
        """Take in what every rank has seen in one step; the first verdict stays, whatever comes after it.

        NaN or a skip on any rank makes the step bad for all, as gradients are shared. A metric that ranks do not share
        has a streak on each, since among many ranks one or another is often at 0 by chance.
        """
        if step <= self.settings.warmup_steps or self.verdict:
            return
        if self.settings.nonfinite:
            self._nonfinite(step, by_rank)
        skips = [rank for rank, values in enumerate(by_rank) if values.get(SKIPPED)]
        if any(SKIPPED in values for values in by_rank):
            self._count(self._of("fp16_skips"), Verdict("fp16_skips", SKIPPED, 1.0, skips, step, 1))
        for rank, values in enumerate(by_rank):
            for name in self.settings.zero_or_constant:
                if name in values:
                    self._unchanged(step, name, rank, values[name])
            for name in self.settings.spike:
                if name in values:
                    self._spike(step, name, rank, values[name])

    def _nonfinite(self, step: int, by_rank: list[dict[str, float]]) -> None:
        seen = [
            (name, values[name], rank)
            for name in (LOSS, GRADIENT)
            for rank, values in enumerate(by_rank)
            if name in values
        ]
        if not seen:
            return  # a step without a loss says nothing
        bad = [entry for entry in seen if not math.isfinite(entry[1])]
        name, value, _ = (bad or seen)[0]
        ranks = [rank for other, _, rank in bad if other == name]
        self._count(self._of("nonfinite"), Verdict("nonfinite", name, value, ranks, step, 1))

    def _unchanged(self, step: int, name: str, rank: int, value: float) -> None:
        series = self._of("zero_or_constant", rank, name)
        before = series.get("last")
        same = before is not None and (value == before or (math.isnan(value) and math.isnan(before)))
        series["last"] = value
        ranks = [rank] if value == 0 or same else []
        self._count(series, Verdict("zero_or_constant", name, value, ranks, step, 1))

    def _spike(self, step: int, name: str, rank: int, value: float) -> None:
        series = self._of("spike", rank, name)
        window = series.setdefault("window", [])
        middle = median(window) if len(window) >= LEAST else None
        # Below 0 a multiple of the median is no bound.
        above = middle is not None and middle > 0 and value > self.settings.spike_factor * middle
        bad = above or not math.isfinite(value)
        if not bad:  # a spike that lasts must not become the median that it is compared with
            window.append(value)
            del window[:-WINDOW]
        self._count(series, Verdict("spike", name, value, [rank] if bad else [], step, 1, middle))

    def _of(self, rule: str, rank: int = 0, name: str = "") -> dict[str, Any]:
        return self._series.setdefault(f"{rule} {rank} {name}".strip(), {"length": 0, "first": 0})

    def _count(self, series: dict[str, Any], one: Verdict) -> None:
        """Add one value to its streak; it is good where it is bad on no rank."""
        if not one.ranks:
            series["length"] = 0
            return
        if series["length"] == 0:
            series["first"] = one.first
        series["length"] += 1
        limit = self.settings.fp16_skips if one.rule == "fp16_skips" else self.settings.steps
        if series["length"] >= limit and self.verdict is None:
            self.verdict = replace(one, first=series["first"], length=series["length"])

    def running_since(self) -> int | None:
        """Return the first step of the longest streak that has not ended; None if nothing is bad."""
        return min((series["first"] for series in self._series.values() if series["length"]), default=None)

    def forgive(self) -> None:
        """Forget the verdict and every streak."""
        self.verdict = None
        for series in self._series.values():
            series["length"] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"series": deepcopy(self._series), "verdict": asdict(self.verdict) if self.verdict else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._series = state["series"]
        self.verdict = Verdict(**state["verdict"]) if state["verdict"] else None
