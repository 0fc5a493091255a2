import pytest
import torch
from torch import nn

from src.errors import UserError
from src.strategies.wrapping import checkpoint_activations, compile_blocks, find_blocks
from tests.small_task import Block, SmallNet, texts

TOKENS = texts(2, seed=1)


def net(dropout: float = 0.0) -> SmallNet:
    torch.manual_seed(0)
    return SmallNet(depth=3, dropout=dropout)


def gradients(model: SmallNet) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    model.loss(model.features(TOKENS[:, :-1]), TOKENS[:, 1:]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Nested(nn.Module):
    """A network inside of another, as a LightningModule has it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = net()


class Stages(nn.Sequential):
    """A network without a loss of its own, whose blocks stand between other layers and deeper."""

    BLOCKS = (Block,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), Block(8, 0.0), nn.Sequential(nn.ReLU(), Block(8, 0.0)))


@pytest.mark.parametrize(("model", "count"), [(net(), 3), (Nested(), 3), (Stages(), 2), (nn.Linear(1, 1), 0)])
def test_blocks_are_found_wherever_they_are(model, count):
    """All instances of the classes in BLOCKS are found, also in a network inside of a module."""
    assert len(find_blocks(model)) == count


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_activations_give_the_same_gradients(dropout):
    """Gradients with activation checkpointing are those without, with dropout too."""
    plain, checkpointed = net(dropout), net(dropout)
    assert checkpoint_activations(checkpointed) == 3
    expected, found = gradients(plain), gradients(checkpointed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_blocks_are_computed_again_only_in_training():
    """A checkpointed block runs once more in the backward pass, and once without one."""
    model, calls = net(), []
    checkpoint_activations(model)
    model.get_submodule("blocks.0.up").register_forward_hook(lambda *_: calls.append(1))
    gradients(model)
    assert len(calls) == 2
    model.eval()
    gradients(model)
    assert len(calls) == 3


def test_checkpoints_load_with_and_without():
    """Names of parameters and buffers stay, so a state loads whether or not activations are checkpointed."""
    plain, checkpointed = net(), net()
    checkpoint_activations(checkpointed)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    checkpointed.load_state_dict(plain.state_dict())


@pytest.fixture
def compiled(monkeypatch) -> list[tuple[object, dict]]:
    """Notes what would be compiled instead of doing it."""
    asked: list[tuple[object, dict]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: asked.append((self, settings)))

    def note(function, **settings):
        asked.append((function, settings))
        return lambda *args: ("compiled", function(*args))

    monkeypatch.setattr(torch, "compile", note)
    return asked


def test_each_block_and_the_loss_are_compiled_once(compiled):
    """Every block is compiled by itself for fixed shapes, the loss beside them too, and nothing else."""
    model = Nested()
    names = list(model.state_dict())
    loss = model.model.loss
    assert compile_blocks(model) == 3
    assert [what for what, _ in compiled] == [*model.model.blocks, loss]
    assert all(settings == {"dynamic": False} for _, settings in compiled)
    assert list(model.state_dict()) == names
    features = model.model.features(TOKENS[:, :-1])
    assert model.model.loss(features, TOKENS[:, 1:])[0] == "compiled"


def test_a_model_without_a_loss_method_has_its_blocks_compiled(compiled):
    """Only blocks are compiled where the network has no loss of its own."""
    model = Stages()
    assert compile_blocks(model) == 2
    assert [what for what, _ in compiled] == [model.get_submodule("1"), model.get_submodule("2.1")]


@pytest.mark.parametrize(
    ("wrap", "setting"), [(checkpoint_activations, "--activation_checkpointing"), (compile_blocks, "--compile")]
)
def test_a_model_that_names_no_blocks_is_refused(wrap, setting):
    """Both settings refuse a model without BLOCKS and say which line it needs."""
    with pytest.raises(UserError, match=rf"{setting} works on .* Sequential names none.*BLOCKS = "):
        wrap(nn.Sequential(nn.Linear(1, 1)))
