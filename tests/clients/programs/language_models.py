"""Language models, with gradients accumulated over several small batches."""

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs.table import Results, bare, program, set_sync, state
from tritonddp.coordination.group import Group

VOCABULARY, CONTEXT, WIDTH = 29, 12, 16
MICROBATCHES, STEPS = 3, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH, bias=False),
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.before_attention(x)).unflatten(-1, (3, 2, WIDTH // 2)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """The head's weight is that of the embedding."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, numbers: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(numbers) + self.positions.weight[: numbers.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def optimizer(self) -> torch.optim.Optimizer:
        params = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def get_batch() -> tuple[Tensor, Tensor]:
    window = torch.randint(VOCABULARY, (2, CONTEXT + 1))
    return window[:, :-1], window[:, 1:]


def get_lr(step: int) -> float:
    return 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))


def issued() -> int:
    """Collectives that the default group has run, whoever called them, or what took their place."""
    group: Any = dist.group.WORLD
    sums = getattr(Group(group).peers, "background", None)
    through_memory = 0 if sums is None else sums.launched
    return group._get_sequence_number_for_group() + through_memory


@program
def gpt_that_sets_require_backward_grad_sync(DDP: Any) -> Results:
    torch.manual_seed(1337 + dist.get_rank())
    model = GPT()
    optimizer = model.optimizer()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ddp = DDP(model)
    raw_model = bare(ddp)
    losses, counts = [], []
    x, y = get_batch()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        before = issued()
        for micro_step in range(MICROBATCHES):
            set_sync(ddp, micro_step == MICROBATCHES - 1)
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                _, loss = ddp(x, y)
                loss = loss / MICROBATCHES
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        counts.append(issued() - before)
        losses.append(loss.item() * MICROBATCHES)
    # After two steps all buckets have their final sizes.
    return state(model=raw_model) | {"losses": losses, "collectives": counts[2:]}


def train_under_no_sync(DDP: Any, recompute: bool) -> Results:
    torch.manual_seed(dist.get_rank())
    model = GPT(recompute)
    ddp = DDP(model, gradient_as_bucket_view=True)
    optimizer = model.optimizer()
    losses, counts = [], []
    for _ in range(STEPS):
        before = issued()
        for micro_step in range(MICROBATCHES):
            last = micro_step == MICROBATCHES - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                _, loss = ddp(*get_batch())
                (loss / MICROBATCHES).backward()
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(issued() - before)
        losses += [loss.item(), norm.item()]
    return state(model=bare(ddp)) | {"losses": losses, "collectives": counts[2:]}


@program
def gpt_under_no_sync(DDP: Any) -> Results:
    return train_under_no_sync(DDP, recompute=False)


@program
def gpt_that_recomputes_its_blocks(DDP: Any) -> Results:
    return train_under_no_sync(DDP, recompute=True)
