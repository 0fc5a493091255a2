from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from src.engine.errors import UserError
from src.engine.resolve.precision import (
    ALIASES,
    CHOICES,
    BF16Mixed,
    Card,
    keep_scale_on_host,
    low_note,
    refuse_mixed_cards,
    resolve_precision,
)
from tests.commands import SMALL, fit
from tests.tiny import Line, loaders, quiet_trainer

V100 = Card("Tesla V100-SXM2-32GB", (7, 0))
T4 = Card("Tesla T4", (7, 5))
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0))
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0))
B200 = Card("NVIDIA B200", (10, 0))
P100 = Card("Tesla P100-PCIE-16GB", (6, 0))


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ([], "32-true"),
        ([P100], "32-true"),
        ([V100, V100], "16-mixed"),
        ([T4], "16-mixed"),
        ([A100], "bf16-mixed"),
        ([H100] * 8, "bf16-mixed"),
        ([B200], "bf16-mixed"),
    ],
)
def test_auto_is_what_the_card_has_units_for(cards, expected):
    """`auto` is bf16 from compute capability 8.0, fp16 on 7.x, fp32 before it and on a CPU."""
    assert resolve_precision("auto", cards).value == expected


def test_auto_names_its_reason():
    """The reason has the card and its compute capability, so that a log explains the choice."""
    assert resolve_precision("auto", [V100]).reason.startswith("Tesla V100-SXM2-32GB, compute capability 7.0: no bf16")
    assert resolve_precision("auto", []).reason == "CPU"


@pytest.mark.parametrize("asked", [name for name in CHOICES if name != "auto"])
def test_an_explicit_precision_is_never_overridden(asked):
    """What is asked for is what is used."""
    assert resolve_precision(asked, [A100]).value == asked


@pytest.mark.parametrize(
    ("alias", "value"), [(16, "16-mixed"), ("bf16", "bf16-mixed"), (32, "32-true"), ("32", "32-true"), (64, "64-true")]
)
def test_lightnings_short_names_are_understood(alias, value):
    """Numbers and short names that Lightning takes mean the same here."""
    assert resolve_precision(alias, [A100]).value == value


@pytest.mark.parametrize("asked", ["bf16-mixed", "bf16-true", "bf16"])
@pytest.mark.parametrize("card", [V100, T4, P100])
def test_emulated_bf16_is_refused(asked, card):
    """On a card that only emulates bf16 one line names the card and what to use; `auto` is accepted there."""
    with pytest.raises(UserError, match=f"{card.name}.* has no bf16 units.* use auto"):
        resolve_precision(asked, [card])


@pytest.mark.parametrize("asked", ["16-mixed", "16-true", 16])
def test_fp16_on_a_cpu_is_refused(asked):
    """fp16 without a GPU is refused with what works there, and that is accepted."""
    with pytest.raises(UserError, match="use 32-true or bf16-mixed"):
        resolve_precision(asked, [])
    assert resolve_precision("bf16-mixed", []).value == "bf16-mixed"


@pytest.mark.parametrize("asked", [*CHOICES[1:], *ALIASES])
def test_a_precision_that_cannot_work_names_those_that_do(asked):
    """On a CPU every precision either works as it is or is refused in one line whose answers are not refused."""
    try:
        value = resolve_precision(asked, []).value
    except UserError as refused:
        said = str(refused)
        assert "\n" not in said
        works = [name for name in CHOICES if name in said.split("; ")[1].split()]
        assert len(works) == 2
        for name in works:
            assert resolve_precision(name, []).value == name
    else:
        assert not value.startswith("16")


@pytest.mark.parametrize("precision", CHOICES[1:])
def test_what_is_rounded_to_16_bits_for_good_is_told(precision):
    """Weights and targets of 16 bits are noted, with the precision that keeps both; it is one there is."""
    note = low_note(precision)
    assert (note is not None) == (precision in ("bf16-true", "16-true"))
    assert note is None or any(f"{name} computes" in note for name in CHOICES if name.endswith("-mixed"))


def test_the_command_says_what_is_rounded(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in bf16-true trains, and its start says what that costs, whatever the strategy."""
    fit(run_root, "low", *SMALL, "--trainer.precision", "bf16-true")
    assert "under bf16-true the optimizer's weights are of 16 bits" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["fp16", "8", "transformer-engine", ""])
def test_an_unknown_precision_is_refused_with_all_names(asked):
    """A name that means nothing is refused with every name that does."""
    with pytest.raises(UserError) as refused:
        resolve_precision(asked, [A100])
    assert all(name in str(refused.value) for name in CHOICES)


def test_mixed_cards_are_refused_with_what_was_found():
    """Two kinds of card in one job are refused, with the number of each, whatever the precision."""
    with pytest.raises(UserError, match=r"1 × NVIDIA A100-SXM4-80GB, 2 × Tesla V100-SXM2-32GB"):
        resolve_precision("32-true", [V100, A100, V100])
    refuse_mixed_cards(["CPU", "CPU"])
    refuse_mixed_cards([])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_fused_optimizer_is_clipped_in_bf16(algorithm: str) -> None:
    """bf16-mixed clips the gradients of a fused optimizer, which Lightning's own refuses."""
    seen: list[float] = []

    class Steep(Line):
        def error(self, batch: torch.Tensor) -> torch.Tensor:
            return 1000 * super().error(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), self.lr, fused=True)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            assert self.weight.grad is not None
            seen.append(self.weight.grad.abs().item())

    plugins = [BF16Mixed("bf16-mixed", "cpu")]
    trainer = quiet_trainer(max_steps=2, plugins=plugins, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)
    trainer.fit(Steep(), *loaders(trainer, torch.ones(4, 1), 2))
    assert seen == pytest.approx([0.5, 0.5], abs=1e-3)


class Elsewhere(torch.Tensor):
    """Stands for a tensor on a GPU."""

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("used", [False, True])
def test_the_loss_scale_stays_where_offloaded_gradients_are(used: bool) -> None:
    """In the host's memory whatever device the loss is on, with the value of a checkpoint; also after a training."""
    plugin = MixedPrecision("16-mixed", "cpu")
    scaler = plugin.scaler
    assert scaler is not None
    if used:
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        scaler._scale, scaler._growth_tracker = Elsewhere(scaler._scale), Elsewhere(scaler._growth_tracker)
    keep_scale_on_host(plugin)
    plugin.load_state_dict(scaler.state_dict() | {"scale": 512.0})
    assert scaler.scale(torch.ones((), device="meta")).is_meta
    assert scaler._scale is not None
    assert type(scaler._scale) is type(scaler._growth_tracker) is torch.Tensor
    assert (scaler._scale.device, scaler.get_scale()) == (torch.device("cpu"), 512.0)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "disabled"])
def test_without_a_loss_scale_nothing_is_kept(scaler: torch.amp.GradScaler | None) -> None:
    """No scaler, or one that is switched off."""
    plugin = BF16Mixed("bf16-mixed", "cpu") if scaler is None else MixedPrecision("16-mixed", "cpu", scaler)
    keep_scale_on_host(plugin)
    assert not hasattr(plugin.scaler, "_scale")
