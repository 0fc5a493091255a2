"""A GPT-2-shaped language model in plain PyTorch: pre-norm blocks, fused attention, tied head.

It knows nothing of devices, strategies or Lightning. Shapes: B samples, T tokens, C channels.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a norm and added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)), self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """Decoder-only transformer.

    Args:
        vocab: number of tokens (256 for bytes)
        width: channels, a multiple of heads
        depth: number of blocks
        heads: attention heads per block
        context: longest sequence, in tokens
        dropout: share of activations dropped in training

    """

    BLOCKS = (Block,)  # what to compile, checkpoint or shard one by one

    def __init__(
        self,
        vocab: int = 256,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is no multiple of heads {heads}")
        self.context, self.width, self.depth = context, width, depth
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                # The stream is a sum of 2 × depth terms (GPT-2 paper, section 2.3).
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def features(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, C), before the head."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, (B, T) -> (B, T, vocab)."""
        return self.head(self.norm(self.features(tokens)))

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats; head and loss are one function so that they compile into one graph."""
        logits = self.head(self.norm(features))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))

    def flops_per_token(self) -> int:
        """Forward and backward, as PaLM counts (arXiv:2204.02311, appendix B): 6 N + 12 depth × width × context."""
        parameters = sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()
        return 6 * parameters + 12 * self.depth * self.width * self.context

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Sample `count` more tokens after `prompt`: (B, T) -> (B, T + count); temperature > 0, top_k ≥ 1."""
        tokens = prompt
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1].float() / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return tokens
