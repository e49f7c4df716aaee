"""Two wrapped networks that are trained against each other."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from programs.table import Results, program, state

NOISE = 6


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 32),
        nn.Unflatten(1, (8, 2, 2)),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator(norm: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1),
        *([nn.BatchNorm2d(8)] if norm else []),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32, 1),
    )


@program
def dcgan(DDP: Any) -> Results:
    """The generator's step leaves gradients in the discriminator, which the next one clears."""
    torch.manual_seed(999 + dist.get_rank())
    # The discriminator runs twice before a backward: its buffers must stay where they are.
    netG, netD = DDP(generator()), DDP(discriminator(norm=True), broadcast_buffers=False)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    losses = []
    for _ in range(5):
        netD.zero_grad()
        label = torch.ones(4)
        errD_real = criterion(netD(torch.randn(4, 1, 4, 4)).view(-1), label)
        errD_real.backward()
        fake = netG(torch.randn(4, NOISE))
        errD_fake = criterion(netD(fake.detach()).view(-1), torch.zeros(4))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
        losses += [errD_real.item(), errD_fake.item(), errG.item()]
    return state(generator=netG, discriminator=netD) | {"losses": losses}


def requires_grad(model: nn.Module, flag: bool) -> None:
    for param in model.parameters():
        param.requires_grad_(flag)


@program
def gan_that_freezes_its_discriminator(DDP: Any) -> Results:
    """One is frozen while the other is trained; and a penalty on the gradient of real images."""
    torch.manual_seed(dist.get_rank())
    netG = DDP(generator(), broadcast_buffers=False)
    netD = DDP(discriminator(norm=False), broadcast_buffers=False)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.0, 0.99))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.0, 0.99))
    for step in range(6):
        requires_grad(netG, False)
        requires_grad(netD, True)
        fake = netG(torch.randn(4, NOISE))
        loss = F.softplus(netD(fake)).mean() + F.softplus(-netD(torch.randn(4, 1, 4, 4))).mean()
        netD.zero_grad()
        loss.backward()
        optimizerD.step()
        if step % 3 == 0:
            real = torch.randn(4, 1, 4, 4, requires_grad=True)
            prediction = netD(real)
            (gradient,) = torch.autograd.grad(prediction.sum(), real, create_graph=True)
            penalty = gradient.pow(2).flatten(1).sum(1).mean()
            netD.zero_grad()
            # The second term reaches the bias of the last layer too, as DDP wants it.
            (5 * penalty + 0 * prediction[0].sum()).backward()
            optimizerD.step()
        requires_grad(netG, True)
        requires_grad(netD, False)
        netG.zero_grad()
        F.softplus(-netD(netG(torch.randn(4, NOISE)))).mean().backward()
        optimizerG.step()
    return state(generator=netG, discriminator=netD)
