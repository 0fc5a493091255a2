import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from src.engine.sharding.wrapping import checkpoint_activations
from src.models.gpt import GPT, Block


def gpt(**settings) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"width": 16, "depth": 2, "heads": 2, "context": 12} | settings)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2))


def test_a_prediction_depends_on_no_later_token():
    """Changing a token changes no logits before it and those at its place."""
    model, text = gpt().eval(), tokens(1, 12)
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(-1).any()


def test_a_prediction_depends_on_all_earlier_tokens_and_their_order():
    """The last logits change with the first token, and with the order of two earlier ones."""
    model, text = gpt().eval(), tokens(1, 12)
    first, swapped = text.clone(), text[:, [1, 0, *range(2, 12)]]
    first[0, 0] = (first[0, 0] + 1) % 256
    last = model(text)[0, -1]
    assert not torch.allclose(last, model(first)[0, -1], atol=1e-7)
    assert not torch.allclose(last, model(swapped)[0, -1], atol=1e-7)


def test_a_prediction_depends_on_the_place():
    """In a text of one repeated byte the logits differ from place to place."""
    logits = gpt()(torch.full((1, 12), 65))[0]
    assert all(not torch.allclose(logits[place], logits[0], atol=1e-6) for place in range(1, 12))


def test_the_head_is_the_embedding():
    """Head and embedding are one parameter, which is counted once."""
    model = gpt()
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_flops_by_hand():
    """FLOPs per token are 6 per parameter without positions, plus 12 × depth × width × context."""
    model = gpt(width=8)
    block = 2 * 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)  # two norms, qkv, out, up, down
    parameters = 256 * 8 + 2 * block + 16
    assert model.flops_per_token() == 6 * parameters + 12 * 2 * 8 * 12


def test_a_fresh_model_knows_nothing():
    """Before training the loss is that of guessing one byte in 256."""
    model, text = gpt(), tokens(8, 13)
    assert model.loss(model.features(text[:, :-1]), text[:, 1:]).item() == pytest.approx(math.log(256), abs=0.1)


def test_the_loss_is_the_cross_entropy_of_the_logits():
    """`loss` of the features is what `forward`'s logits give."""
    model, text = gpt(), tokens(3, 13)
    expected = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    assert torch.allclose(model.loss(model.features(text[:, :-1]), text[:, 1:]), expected)


def test_what_is_added_to_the_stream_starts_smaller_in_deeper_models():
    """The last matrix of each branch starts with 1/sqrt(2 × depth) of the others' spread."""
    model = gpt(width=64, depth=8)
    for name, parameter in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            assert parameter.std().item() == pytest.approx(0.02 / 4, rel=0.1), name
        elif name.endswith(("qkv.weight", "up.weight")):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name


def test_dropout_is_for_training_only():
    """With dropout two passes differ in training and are equal in evaluation."""
    model, text = gpt(dropout=0.5), tokens(1, 12)
    assert not torch.equal(model(text), model(text))
    model.eval()
    assert torch.equal(model(text), model(text))


def test_a_width_that_heads_cannot_share_is_refused():
    """A width that is no multiple of heads raises with both numbers."""
    with pytest.raises(ValueError, match="width 16 is no multiple of heads 3"):
        gpt(heads=3)


@pytest.mark.parametrize(("length", "count"), [(1, 5), (4, 0), (12, 3), (20, 30)])
def test_generated_text_continues_the_prompt(length, count):
    """`generate` keeps the prompt, however long, and adds as many tokens of the vocabulary as asked."""
    prompt = tokens(3, length)
    text = gpt(vocab=300).generate(prompt, count)
    assert text.shape == (3, length + count)
    assert torch.equal(text[:, :length], prompt)
    assert not text.requires_grad
    assert int(text.max()) < 300


def test_top_k_of_one_is_the_likeliest_token():
    """With top_k 1 each token is the argmax of the logits before it, at any temperature."""
    model, prompt = gpt().eval(), tokens(2, 4)
    text = model.generate(prompt, 6, temperature=50.0, top_k=1)
    for end in range(4, 10):
        assert torch.equal(text[:, end], model(text[:, :end])[:, -1].argmax(-1))


def test_a_low_temperature_is_nearly_greedy():
    """Dividing by a tiny temperature leaves only the likeliest token."""
    model, prompt = gpt().eval(), tokens(2, 4)
    assert torch.equal(model.generate(prompt, 6, temperature=1e-6), model.generate(prompt, 6, top_k=1))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputed_blocks_give_the_same_gradients(dropout):
    """All blocks are named, and gradients with recomputed activations are those without, with dropout too."""
    plain, recomputed, text = gpt(dropout=dropout), gpt(dropout=dropout), tokens(2, 13)
    assert checkpoint_activations(recomputed) == 2
    for model in (plain, recomputed):
        torch.manual_seed(7)
        model.loss(model.features(text[:, :-1]), text[:, 1:]).backward()
    for (name, expected), found in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert expected.grad is not None, name
        assert found.grad is not None, name
        assert torch.equal(expected.grad, found.grad), name


@pytest.fixture
def whole_graph():
    """Compiles without a compiler: an error wherever the graph would break."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_is_one_graph(whole_graph, recompute):
    """A block compiles without a graph break, with recomputed activations too, and gives the same result."""
    block, x = Block(16, 2, dropout=0.0), torch.randn(2, 12, 16)
    expected = block(x)
    if recompute:
        stack = nn.Sequential(block)
        stack.BLOCKS = (Block,)  # type: ignore[assignment]
        checkpoint_activations(stack)
    found = whole_graph(block)(x)
    assert torch.allclose(found, expected)
    found.sum().backward()
    assert block.qkv.weight.grad is not None


def test_head_and_loss_are_one_graph(whole_graph):
    """Head and loss compile into one graph and give the same loss."""
    model, text = gpt(), tokens(2, 13)
    features = model.features(text[:, :-1]).detach()
    assert torch.allclose(whole_graph(model.loss)(features, text[:, 1:]), model.loss(features, text[:, 1:]))
