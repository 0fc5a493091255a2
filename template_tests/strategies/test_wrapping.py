import pytest
import torch
from torch import nn

from src.engine.errors import AgreedError, UserError
from src.engine.sharding.wrapping import checkpoint_activations, compile_blocks, find_blocks, find_units, norms_in_fp32
from src.strategies.fsdp import FSDP
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


@pytest.mark.parametrize("listed", [Block, ("Block",), "Block", {Block: 1}, (Block, None)], ids=str)
def test_blocks_that_are_no_list_of_classes_are_refused(listed):
    """One line says whose BLOCKS it is, what it is and how it is written."""
    model = nn.Sequential(nn.Linear(1, 1))
    model.BLOCKS = listed
    with pytest.raises(AgreedError, match=r"^BLOCKS of Sequential is .*: list the blocks' classes .*\(YourBlock,\)$"):
        find_blocks(model)


class Big(nn.Module):
    """A layer of a million parameters, with a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.small = nn.Linear(1000, 1000), nn.Linear(2, 2)


class Hub(nn.Module):
    """As a Hugging Face model says it: class names that must not be split, on the inner model."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        object.__setattr__(self.model, "_no_split_modules", ["Block", "Absent"])
        self.model.layers = nn.ModuleList([Block(4, 0.0), Block(4, 0.0)])
        self.model.embed, self.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight


class Outer(nn.Module):
    """A block that holds blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beside = Block(4, 0.0), nn.Linear(4, 4)


class Tree(nn.Module):
    """Blocks in blocks."""

    BLOCKS = (Outer, Block)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Outer(), Outer()


def shared(model: nn.Module, one: str, other: str) -> nn.Module:
    """The model with one parameter in two places."""
    place, _, attribute = one.rpartition(".")
    setattr(model.get_submodule(place), attribute, model.get_parameter(other))
    return model


def named(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for part, module in parts.items():
        model.add_module(part, module)
    return model


def attention() -> nn.Module:
    return nn.MultiheadAttention(1024, 2)  # its two projections have 3.1 and 1.0 million parameters


UNITS = [
    ("blocks", Nested(), ["model.blocks.2", "model.blocks.1", "model.blocks.0"]),
    ("a block that is deeper", Stages(), ["2.1", "1"]),
    ("inner blocks first", Tree(), ["second.inner", "second", "first.inner", "first"]),
    ("what must not be split", Hub(), ["model.layers.1", "model.layers.0"]),
    ("tied weights of the root", Hub(tied=True), ["model.layers.1", "model.layers.0"]),
    ("by size", named(a=Big(), b=Big()), ["a.wide", "b.wide"]),
    ("by size, never a list", named(parts=nn.ModuleList([Big(), Big()])), ["parts.0.wide", "parts.1.wide"]),
    ("by size, never a dictionary", named(parts=nn.ModuleDict({"x": Big()})), ["parts.x.wide"]),
    (
        "by size, never a list of parameters",
        named(parts=nn.ParameterList([torch.zeros(1000, 1000)]), a=Big()),
        ["a.wide"],
    ),
    ("a list of small parts", named(parts=nn.ModuleList([nn.Linear(800, 800), nn.Linear(800, 800)])), []),
    (
        "small parts that are many together",
        named(part=nn.Sequential(nn.Linear(800, 800), nn.Linear(800, 800))),
        ["part"],
    ),
    ("attention as one", named(part=attention(), head=nn.Linear(2, 2)), ["part"]),
    ("tied big parts", shared(named(a=nn.Linear(1000, 1000), b=nn.Linear(1000, 1000)), "a.weight", "b.weight"), []),
    ("nothing big", net().blocks, []),
    ("the model itself", nn.Linear(1000, 1000), []),
]


class Normed(nn.Module):
    """Every kind of norm; one has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.batch, self.group, self.layer = nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4)
        self.instance, self.plain = nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm1d(4)


@pytest.mark.parametrize(
    ("device", "names"), [("cuda", ["batch", "instance"]), ("cpu", ["batch", "group", "layer", "instance"])]
)
def test_norms_whose_kernels_want_32_bits_are_found(device, names):
    """Those with running statistics; on CPUs, where autocast leaves their inputs as they are, the others too."""
    model = Normed()
    assert norms_in_fp32(model, device) == [getattr(model, name) for name in names]


@pytest.mark.parametrize(("model", "names"), [unit[1:] for unit in UNITS], ids=[unit[0] for unit in UNITS])
def test_units_are_found(model, names):
    """Units are the blocks, what must not be split, or what is big: by their names, inner ones before outer ones."""
    units = find_units(model)
    found = [name for name, _ in units]
    assert sorted(found) == sorted(names)
    assert all(model.get_submodule(name) is unit for name, unit in units)
    places = {name: place for place, name in enumerate(found)}
    assert all(places[a] < places[b] for a in found for b in found if a.startswith(f"{b}."))


def test_blocks_that_share_a_parameter_stay_with_the_root():
    """Two blocks with one weight are no units, and the third is one."""
    assert [name for name, _ in find_units(shared(net(), "blocks.0.up.weight", "blocks.1.up.weight"))] == ["blocks.2"]


def test_units_are_told():
    """Rank 0 says how many units of which size are gathered."""
    model = named(body=nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(3)]), head=nn.Linear(10, 10))
    assert FSDP()._notes(model, find_units(model)) == [
        "note: fsdp gathers 3 x Linear, of at most 1,000,000 parameters, one by one"
    ]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(3, 3), "found no blocks, so all parameters are gathered at once"),
        (net(), "starting a transfer takes longer than the transfer"),
    ],
)
def test_a_division_that_does_not_help_is_warned_of(model, reason):
    """A model that is gathered as a whole, or in crumbs, is warned of with the reason and with what to do."""
    (warning,) = FSDP()._notes(model, find_units(model))
    assert warning.startswith("warning: fsdp")
    assert reason in warning
    assert "BLOCKS" in warning
