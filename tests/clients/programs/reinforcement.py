"""Programs that call the module inside, and optimizers that call the model."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from programs.table import Results, bare, program, state


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)

    @torch.no_grad()
    def act(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        chances = Categorical(logits=self.actor(self.body(observations)))
        actions = chances.sample()
        return actions, chances.log_prob(actions)

    def forward(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(observations)
        chances = Categorical(logits=self.actor(features))
        return chances.log_prob(actions), self.critic(features).squeeze(-1), chances.entropy()


@program
def policy_gradients_with_rollouts_by_the_module(DDP: Any) -> Results:
    torch.manual_seed(dist.get_rank())
    policy = DDP(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    for _ in range(2):
        observations = torch.randn(16, 5)
        actions, before = bare(policy).act(observations)
        advantages, returns = torch.randn(16), torch.randn(16)
        for _ in range(2):
            for chosen in torch.randperm(16).chunk(2):
                log_prob, value, entropy = policy(observations[chosen], actions[chosen])
                ratio = (log_prob - before[chosen]).exp()
                gain = advantages[chosen]
                surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = -surrogate + 0.5 * F.mse_loss(value, returns[chosen])
                optimizer.zero_grad()
                (loss - 0.01 * entropy.mean()).backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
    return state(policy=policy)


@program
def lbfgs_with_a_closure(DDP: Any) -> Results:
    """The optimizer runs the model several times a step, as often on all ranks."""
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # or the ranks would stop at different times
        losses.append(mean.item())
        return mean / dist.get_world_size()

    for _ in range(3):
        optimizer.step(closure)
    return state(model=model) | {"losses": losses}
