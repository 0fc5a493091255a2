"""Restore a checkpoint, and let settings that have changed since it was written win over its state.

The states of optimizers, schedulers and callbacks hold their settings as well: a learning rate, `gamma`, `patience`.
Loading them as they are would undo what a resumed run was given. So each checkpoint also has the states that its start
was *built* with. What the configuration of now builds differently takes effect; all else is restored bit for bit.
"""

import copy
import itertools
import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from src.engine.checkpoint.contents import average_in
from src.engine.errors import AgreedError
from src.engine.nested import rebuild

BUILT = "built"  # where a checkpoint has it
DERIVED = {"initial_lr", "base_lrs", "_last_lr"}  # by schedulers, from `lr`
# What an option of PyTorch's optimizers keeps for each parameter while it is on; zeros in the first step.
KEPT_FOR = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
LARGEST_BUFFER = 2**16  # numbers; larger ones, such as masks, follow from the shape of the model
State = dict[str, Any]


class Restore(_CheckpointConnector):
    """Load the file that the command names and no other, under the settings of now.

    Without a path Lightning looks by itself: for `hpc_ckpt_<N>.ckpt` in the working directory inside a Slurm job, and
    for what an OnExceptionCheckpoint has left in its folder. Either may be another run's.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._built: State = {}
        self._groups: list[list[State]] = []  # settings of the optimizers' groups, as built
        trainer.strategy.setup_optimizers = self._set_up_optimizers  # type: ignore[method-assign]

    def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        return ckpt_path or None

    def dump_checkpoint(self, weights_only: bool | None = None) -> State:
        """Add the states that this start was built with."""
        return super().dump_checkpoint(weights_only) | {BUILT: self._built}

    def restore_model(self) -> None:
        """Restore the weights, and every buffer but those that a changed setting has filled.

        A loss keeps its classes' weights as a buffer, a diffusion its betas: the checkpoint would bring the old values
        back. Where a setting of the model has changed, a buffer that is built with another value than before, and that
        training has left as it was built, keeps the value of now.
        """
        then, module = self._loaded_checkpoint.get(BUILT, {}), self.trainer.lightning_module
        settings = getattr(self.trainer, "model_settings", None)
        self._built |= {"model": settings, "buffers": _small_buffers(module)}
        if self.trainer.training and then.get("model") != settings:
            weights, average = self._loaded_checkpoint.get("state_dict", {}), average_in(self._loaded_checkpoint)
            for name, before in then.get("buffers", {}).items():
                now, saved = self._built["buffers"].get(name), weights.get(name)
                if _same(before, now) is False and _same(before, saved):
                    weights[name] = now
                    if name in average:
                        average[name] = now
                    self._note(f"{type(module).__name__} continues with the buffer {name} of the new settings")
        super().restore_model()

    def restore_callbacks(self) -> None:
        """Restore the callbacks that the user has configured with their settings of now."""
        callbacks = {call.state_key: call for call in self.trainer.callbacks if not _is_ours(call)}  # type: ignore[attr-defined]
        fresh = {key: copy.deepcopy(call.state_dict()) for key, call in callbacks.items()}
        self._built["callbacks"] = {key: _comparable(state) for key, state in fresh.items() if state}
        super().restore_callbacks()
        for key, before in self._loaded_checkpoint.get(BUILT, {}).get("callbacks", {}).items():
            if changed := _changed(before, self._built["callbacks"].get(key, {})):
                state = callbacks[key].state_dict() | {name: fresh[key][name] for name in changed}
                callbacks[key].load_state_dict(state)
                self._say(type(callbacks[key]).__name__, before, state, changed)

    def restore_optimizers_and_schedulers(self) -> None:
        """Restore the optimizers and the schedules with their settings of now, at the position of the checkpoint."""
        then, now = self._loaded_checkpoint.get(BUILT, {}), self._built
        if "optimizers" not in then:  # a checkpoint that was written without this class
            super().restore_optimizers_and_schedulers()
            return
        self._refuse_other(then["optimizers"], now["optimizers"])
        optimizers, schedulers = self.trainer.optimizers, [c.scheduler for c in self.trainer.lr_scheduler_configs]
        fresh = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        of = [next(n for n, one in enumerate(optimizers) if one is scheduler.optimizer) for scheduler in schedulers]
        groups = self._groups
        turned_on = [
            _turned_on(before["groups"], group) for before, group in zip(then["optimizers"], groups, strict=True)
        ]
        reduced: dict[int, list[float]] = {}  # how far schedules had come down, of optimizers with another rate now
        for number, state in enumerate(self._loaded_checkpoint["optimizer_states"]):
            saved = [group.get("lr") for group in state["param_groups"]]
            unscheduled = number not in of and len(schedulers) < len(then["schedulers"])
            if self._update_groups(state["param_groups"], groups[number], then["optimizers"][number], unscheduled):
                rates = [group.get("lr") for group in then["optimizers"][number]["groups"]]
                # A rate of 0 is a warm-up's beginning, which a schedule that follows a metric has none of.
                reduced[number] = [rate / was if was else 1.0 for rate, was in zip(saved, rates, strict=False)]
        super().restore_optimizers_and_schedulers()
        for optimizer, options in zip(optimizers, turned_on, strict=True):
            _start_state(optimizer, options)
        for number, scheduler in enumerate(schedulers):
            before, built = then["schedulers"][number : number + 1] or [{}], now["schedulers"][number]
            names = _changed(before[0], built) if before[0] else {"class"}
            saved_rate = scheduler.optimizer.param_groups[0]["lr"]
            another_function = not names and _gives_another_rate(scheduler)
            if not names and of[number] not in reduced and not another_function:
                continue
            self._say(built["class"], before[0], built, names)
            state = self._loaded_checkpoint["lr_schedulers"][number] if before[0] else {}
            if isinstance(scheduler, ReduceLROnPlateau) and "class" not in names:
                # It follows a metric: it keeps what it has seen, and how far it has reduced the rate.
                scheduler.load_state_dict(state | {name: fresh[number][name] for name in names - DERIVED})
                for group, share in zip(scheduler.optimizer.param_groups, reduced.get(of[number], []), strict=False):
                    group["lr"] *= share
            else:
                self._replay(scheduler, groups[of[number]], fresh[number], _position(state))
                if another_function:
                    rate = scheduler.optimizer.param_groups[0]["lr"]
                    self._say(built["class"], {"lr": saved_rate}, {"lr": rate}, {"lr"})

    def _update_groups(self, saved: list[State], now: list[State], then: State, unscheduled: bool) -> bool:
        """Put what the configuration has changed into a saved optimizer state; return whether a rate is among it.

        Before the state is loaded, since these settings say on which device its tensors belong.
        """
        rate_changed = unscheduled
        for group, values, before in zip(saved, now, then["groups"], strict=False):
            names = _changed(before, _comparable(values)) | ({"lr"} if unscheduled else set())
            self._say(then["class"], before, values, names)
            group.update({name: values[name] for name in names})
            rate_changed |= bool(names & {"lr", "initial_lr"})
        return rate_changed

    def _set_up_optimizers(self, trainer: Trainer) -> None:
        """Note what the configuration builds, before a callback regroups it, as BaseFinetuning does on resume."""
        strategy = trainer.strategy
        type(strategy).setup_optimizers(strategy, trainer)
        self._groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._built["optimizers"] = [
            {
                "class": type(optimizer).__qualname__,
                "groups": [_comparable(_settings(group)) for group in optimizer.param_groups],
                "sizes": [len(group["params"]) for group in optimizer.param_groups],
            }
            for optimizer in self.trainer.optimizers
        ]
        self._built["schedulers"] = [
            _comparable(config.scheduler.state_dict()) | {"class": type(config.scheduler).__qualname__}
            for config in self.trainer.lr_scheduler_configs
        ]

    def _refuse_other(self, before: list[State], now: list[State]) -> None:
        was, are = (
            " and ".join(f"{state['class']} of {len(state['sizes'])} group(s)" for state in states)
            for states in (before, now)
        )
        same = [[(state["class"], state["sizes"]) for state in states] for states in (before, now)]
        if same[0] != same[1]:
            detail = "with other parameters in a group" if was == are else f"and the configuration builds {are}"
            raise AgreedError(
                f"the checkpoint's optimizer state is of {was}, {detail}: one does not fit the other. Give the "
                "settings it was trained with, or start another run with --fresh"
            )

    def _replay(self, scheduler: Any, built: list[State], fresh: State, position: int) -> None:
        """Bring a schedule to `position`: it is a function of how often it was stepped, so step it as often."""
        groups = scheduler.optimizer.param_groups
        restored = [_settings(group) for group in groups]
        for group, values in zip(groups, built, strict=False):
            group.update(copy.deepcopy(values))
        scheduler.load_state_dict(fresh)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer was not stepped in between
                for _ in range(position - _position(fresh)):
                    scheduler.step()
        except ValueError as error:  # OneCycleLR, beyond its end
            raise AgreedError(
                f"the schedule that is configured, {type(scheduler).__name__}, cannot be continued at position "
                f"{position} of the checkpoint ({error}): make it longer, or start another run with --fresh"
            ) from error
        for group, values, before in zip(groups, built, restored, strict=False):
            moved = {name for name in values if group[name] != values[name]} | {"lr", "initial_lr"}
            group.update({name: value for name, value in before.items() if name not in moved})

    def _say(self, what: str, before: State, now: State, names: set[str]) -> None:
        shown = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in sorted(names - DERIVED))
        if shown:
            self._note(f"{what} continues with {shown}")

    def _note(self, text: str) -> None:
        if self.trainer.is_global_zero:
            print(f"note: {text}", flush=True)


def _is_ours(callback: object) -> bool:
    """Return whether this project adds it to every run: its settings do not come from its state."""
    return type(callback).__module__.startswith("src.engine.")


def _small_buffers(module: LightningModule) -> State:
    """Return copies of the buffers that a checkpoint keeps, by name, on the CPU."""
    small = {name: buffer for name, buffer in module.named_buffers() if buffer.numel() <= LARGEST_BUFFER}
    kept = module.state_dict().keys() if small else ()
    return {name: buffer.detach().cpu().clone() for name, buffer in small.items() if name in kept}


def _same(before: Tensor, other: Tensor | None) -> bool | None:
    """Return whether two buffers hold the same numbers, also in another type; None without a second of this shape."""
    if other is None or before.shape != other.shape:
        return None
    return torch.equal(before.to(other.dtype), other.cpu())


def _turned_on(before: list[State], now: list[State]) -> set[str]:
    """Return the options of `KEPT_FOR` that an optimizer had not and has now, in any of its groups."""
    return {
        name for name in KEPT_FOR for old, new in zip(before, now, strict=True) if new.get(name) and not old.get(name)
    }


def _start_state(optimizer: torch.optim.Optimizer, options: set[str]) -> None:
    """Give every parameter with restored state what options that are on from now on keep there."""
    for parameter, state in optimizer.state.items():
        for key in (KEPT_FOR[name] for name in options):
            state.setdefault(key, torch.zeros_like(parameter, memory_format=torch.preserve_format))


def _settings(group: State) -> State:
    return {name: value for name, value in group.items() if name != "params"}


def _comparable(state: State) -> State:
    """Return what of a state can be kept in a checkpoint and compared: numbers, texts and what is made of them."""
    numbers = rebuild(
        state, lambda _, value: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    )
    return {name: value for name, value in numbers.items() if isinstance(name, str) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, itertools.chain(value.keys(), value.values())))
    return value is None or type(value) in (bool, int, float, str)


def _changed(before: State, now: State) -> set[str]:
    return {name for name in now if name in before and before[name] != now[name]}


def _gives_another_rate(scheduler: Any) -> bool:
    """Return whether a restored LambdaLR now has a function that gives another rate at the same position.

    Its functions are not in its state. Other schedules derive each rate from the one before, which a module may have
    set by hand, so that a difference would say nothing.
    """
    if hasattr(scheduler, "_schedulers"):
        return any(_gives_another_rate(inner) for inner in scheduler._schedulers)
    if type(scheduler) is not LambdaLR or scheduler.last_epoch < 0:  # below 0: its turn in a sequence is yet to come
        return False
    rates = [rate * of(scheduler.last_epoch) for rate, of in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    return [float(rate) for rate in rates] != [float(rate) for rate in scheduler._last_lr]


def _position(state: State) -> int:
    """Return how often a schedule was stepped; of several in one, the first's."""
    while "last_epoch" not in state and state.get("_schedulers"):
        state = state["_schedulers"][0]
    return int(state.get("last_epoch", 0))
