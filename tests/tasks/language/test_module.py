import math

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from src.tasks.language import LanguageModule
from tests.tiny import loaders, quiet_trainer


def module(**settings) -> LanguageModule:
    torch.manual_seed(0)
    small = {"width": 16, "depth": 1, "heads": 2, "context": 8, "warmup_steps": 4, "sample_bytes": 0}
    return LanguageModule(**small | settings)


WINDOWS = torch.tensor([list(b"abcabcabc"), list(b"bcabcabca"), list(b"cabcabcab")] * 8, dtype=torch.uint8)


@pytest.fixture
def fit(rows):
    """Trains on a text of three letters; returns the module and the Trainer."""

    def run(steps, validate=0, **settings):
        model = module(**settings)
        trainer = quiet_trainer(logger=[rows], max_steps=steps, val_check_interval=1, limit_val_batches=validate)
        trainer.fit(model, *loaders(trainer, WINDOWS, 8))
        return model, trainer

    return run


def test_bits_per_byte_are_the_loss_in_bits(fit, rows):
    """Validation logs the loss in nats and in bits per byte: about 8 bits before training, and less after it."""
    fit(steps=20, validate=2, lr=0.01)
    loss, bits = rows.curve("val/loss"), rows.curve("val/bpb")
    assert all(bits[step] == pytest.approx(loss[step] / math.log(2)) for step in loss)
    assert bits[0] == pytest.approx(8, abs=0.5)
    assert bits[19] < bits[0] - 1


def test_the_loss_is_about_the_next_byte(fit):
    """After training on abcabc… the model continues it."""
    model, _ = fit(steps=60, lr=0.01, warmup_steps=10)
    model.eval()
    text = model.model.generate(torch.tensor([list(b"abca")]), 4, top_k=1)
    assert bytes(text[0].tolist()) == b"abcabcab"


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(fit):
    """The rate rises in equal steps over the warm-up, peaks at lr, then falls as a cosine to a tenth at the end."""
    model, trainer = fit(steps=12)
    shares = [model._lr_share(step) for step in range(13)]
    assert shares[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert shares[8] == pytest.approx(0.55)
    assert shares[12] == pytest.approx(0.1)
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 3e-3)


def test_without_warmup_training_starts_at_the_peak(fit):
    """Zero warm-up steps divide by nothing."""
    model, _ = fit(steps=2, warmup_steps=0)
    assert model._lr_share(0) == 1.0


def test_only_matrices_decay():
    """Each parameter is in exactly one group: matrices with weight decay, norms and biases without."""
    model = module(weight_decay=0.3)
    model.trainer = None
    groups = model.configure_optimizers()["optimizer"].param_groups
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in model.parameters()})
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.3, {2}), (0.0, {1})]


def test_a_sample_is_drawn_where_the_model_was_trained(fit, capsys, monkeypatch):
    """Before Lightning brings the model to the CPU, where a large one takes minutes."""
    monkeypatch.setattr(Strategy, "teardown", lambda self: print("to the CPU"))
    fit(steps=1, sample_bytes=5)
    said = capsys.readouterr().out
    assert 0 < said.find("--- sample ---") < said.find("to the CPU")


def test_a_sample_is_printed_when_training_ends(fit, capsys):
    """The sample starts with the prompt; with zero bytes none is printed."""
    fit(steps=1, sample_bytes=20, prompt="abc")
    said = capsys.readouterr().out
    assert "--- sample ---\nabc" in said
    fit(steps=1, sample_bytes=0)
    assert "sample" not in capsys.readouterr().out


@pytest.mark.parametrize("prompt", ["", "ünïcode", "longer than the context of eight bytes"])
def test_any_prompt_will_do(fit, capsys, prompt):
    """An empty prompt, one beyond ASCII and one longer than the context print a sample."""
    fit(steps=1, sample_bytes=5, prompt=prompt)
    assert f"--- sample ---\n{prompt}" in capsys.readouterr().out


def test_predictions_rewrite_the_second_half():
    """`predict_step` keeps the first half of each window and gives as many bytes as the window has."""
    found = module().eval().predict_step(WINDOWS[:5], 0)
    assert found.shape == (5, 8)
    assert found.dtype == torch.uint8
    assert torch.equal(found[:, :4], WINDOWS[:5, :4])


def test_speed_is_counted_in_tokens():
    """A sample is `context` tokens, and its FLOPs are those of as many tokens."""
    model = module()
    assert model.tokens_per_sample == 8
    assert model.flops_per_sample == 8 * model.model.flops_per_token()
