"""A small language model in the manner of minGPT: gradient accumulation, no_sync, clipping.

It knows nothing of tritonddp.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 96


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        batch, time, channels = x.shape
        q, k, v = self.c_attn(x).split(channels, dim=2)
        q, k, v = (
            each.view(batch, time, self.n_head, channels // self.n_head).transpose(1, 2)
            for each in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, time, channels))


class Layer(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, n_layer, n_head, n_embd, block_size):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Layer(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=5000)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--n-embd", type=int, default=64)
    parser.add_argument("--n-layer", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if use_cuda else "gloo")
    rank, local_rank = torch.distributed.get_rank(), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}" if use_cuda else "cpu"
    torch.manual_seed(1337 + rank)
    with open(torch.__file__, encoding="utf-8") as file:
        text = torch.tensor([min(max(ord(each) - 32, 0), VOCABULARY - 1) for each in file.read()])

    def get_batch():
        starts = torch.randint(len(text) - args.block_size - 1, (args.batch_size,)).tolist()
        x = torch.stack([text[i : i + args.block_size] for i in starts])
        y = torch.stack([text[i + 1 : i + 1 + args.block_size] for i in starts])
        return x.to(device), y.to(device)

    model = GPT(args.n_layer, 4, args.n_embd, args.block_size).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    for it in range(args.max_iters):
        for micro_step in range(args.accumulate):
            last = micro_step == args.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(*get_batch()) / args.accumulate
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if it % 100 == 0 and rank == 0:
            print(f"iter {it}: loss {loss.item() * args.accumulate:.4f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
