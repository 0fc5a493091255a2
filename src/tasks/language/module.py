"""Next-byte prediction: loss, optimizer, schedule and a sample at the end."""

import math

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from src.engine.errors import UserError
from src.models.gpt import GPT


class LanguageModule(LightningModule):
    """Trains a byte-level GPT.

    Args:
        width: channels, a multiple of heads
        depth: number of blocks
        heads: attention heads per block
        context: bytes per sample
        dropout: share of activations dropped in training
        lr: peak learning rate of AdamW
        weight_decay: of matrices; vectors (norms, biases) have none
        warmup_steps: optimizer steps from 0 to lr; then a cosine down to a tenth of it at the last step
        prompt: what the printed sample continues
        sample_bytes: length of the sample printed when training ends; 0 prints none

    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        prompt: str = "\ndef ",
        sample_bytes: int = 400,
    ) -> None:
        super().__init__()
        if width % heads or context < 1 or not 0 <= dropout < 1:
            raise UserError(
                f"model: width {width} must be a multiple of heads {heads}, context {context} at least 1, "
                f"dropout {dropout} from 0 to below 1"
            )
        self.model = GPT(256, width, depth, heads, context, dropout)
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps
        self.prompt, self.sample_bytes = prompt, sample_bytes
        self.tokens_per_sample = context  # for tokens/s
        self.flops_per_sample = context * self.model.flops_per_token()  # for MFU

    def forward(self, prompt: Tensor) -> Tensor:
        """(B, T) bytes -> (B, T + sample_bytes). A call of the module, as that is where a sharded one is gathered."""
        return self.model.generate(prompt, self.sample_bytes, temperature=0.8, top_k=40)

    def _loss(self, batch: Tensor) -> Tensor:
        """(B, T + 1) bytes -> mean loss in nats per byte."""
        tokens = batch.long()  # bytes travel to the device, indices are made there
        return self.model.loss(self.model.features(tokens[:, :-1]), tokens[:, 1:])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss; the command line's callbacks log it as train/loss."""
        return self._loss(batch)

    def _evaluate(self, batch: Tensor, split: str) -> None:
        loss = self._loss(batch)
        # bits per byte: 8 for a model that knows nothing
        metrics = {f"{split}/loss": loss, f"{split}/bpb": loss / math.log(2)}
        self.log_dict(metrics, batch_size=batch.shape[0], on_epoch=True, sync_dist=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return each window of T bytes with its second half written anew: uint8 of shape (B, T)."""
        tokens = batch[:, :-1].long()
        half = tokens.shape[1] // 2
        return self.model.generate(tokens[:, :half], tokens.shape[1] - half, top_k=20).to(torch.uint8)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # One kernel for all parameters; with fp16 it would unscale gradients itself, after they are clipped.
        fused = self.device.type == "cuda" and self.trainer.scaler is None
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=fused)
        schedule = LambdaLR(optimizer, self._lr_share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lr_share(self, step: int) -> float:
        """Return the share of `lr` at an optimizer step."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        last = self.trainer.estimated_stepping_batches
        if last == math.inf:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, last - self.warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def on_train_end(self) -> None:
        """Print a sample; every rank computes it, because a sharded model cannot run on one rank alone.

        When `on_fit_end` comes, the model is on the CPU: a GPT of 1.2 B parameters took minutes there.
        """
        if not self.sample_bytes:
            return
        self.eval()
        prompt = torch.tensor(list(self.prompt.encode()) or [0], device=self.device)[None]
        # Each text is one byte longer: a compiled block would be compiled anew for many of them.
        with self.trainer.precision_plugin.forward_context(), torch.compiler.set_stance("force_eager"):
            sample = self(prompt)[0]
        if self.trainer.is_global_zero:
            text = bytes(sample.tolist()).decode("utf-8", "replace").replace("\0", "\n")
            print(f"\n--- sample ---\n{text.strip()}\n--------------\n")
