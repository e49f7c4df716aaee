"""Learning without labels: a student and its teacher, contrasted pairs."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from programs.table import Results, bare, program, state


class MultiCrop(nn.Module):
    """Crops of one size go through the backbone together, and all through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 10, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = sorted({crop.shape[-1] for crop in crops}, reverse=True)
        groups = [[crop for crop in crops if crop.shape[-1] == size] for size in sizes]
        features = torch.cat([self.backbone(torch.cat(group)) for group in groups])
        return self.last_layer(F.normalize(self.mlp(features), dim=-1))


@program
def student_and_teacher(DDP: Any) -> Results:
    """As in DINO: the teacher is wrapped too, for its BatchNorm, and never has gradients."""
    torch.manual_seed(dist.get_rank())
    student = MultiCrop()
    teacher = copy.deepcopy(student)
    teacher = DDP(teacher)
    teacher_without_ddp = bare(teacher)
    student = DDP(student)
    teacher_without_ddp.load_state_dict(bare(student).state_dict())
    for param in teacher.parameters():
        param.requires_grad = False
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-2)
    center = torch.zeros(1, 10)
    for step in range(5):
        crops = [torch.randn(3, 1, 8, 8) for _ in range(2)]
        crops += [torch.randn(3, 1, 5, 5) for _ in range(2)]
        taught = teacher(crops[:2])
        learnt = student(crops)
        targets = F.softmax((taught - center) / 0.04, dim=-1).detach().chunk(2)
        outputs = (learnt / 0.1).chunk(4)
        terms = [
            -(target * F.log_softmax(output, dim=-1)).sum(-1).mean()
            for i, target in enumerate(targets)
            for j, output in enumerate(outputs)
            if i != j
        ]
        loss = sum(terms) / len(terms)
        batch_center = taught.detach().sum(0, keepdim=True)
        dist.all_reduce(batch_center)
        center = center * 0.9 + batch_center / (len(taught) * dist.get_world_size()) * 0.1
        optimizer.zero_grad()
        loss.backward()
        for name, param in student.named_parameters():
            if param.grad is not None:
                param.grad.mul_((3.0 / (param.grad.norm() + 1e-6)).clamp(max=1))
                if step < 2 and "last_layer" in name:
                    param.grad = None
        optimizer.step()
        with torch.no_grad():
            pairs = zip(bare(student).parameters(), teacher_without_ddp.parameters(), strict=True)
            for mine, theirs in pairs:
                theirs.data.mul_(0.9).add_(0.1 * mine.detach().data)
    return state(student=student, teacher=teacher) | {"center": center, "loss": loss.item()}


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 4), nn.EmbeddingBag(12, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pair = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return (*pair, self.logit_scale.exp())


@program
def pairs_contrasted_over_all_ranks(DDP: Any) -> Results:
    """As in CLIP: features of all ranks are gathered with gradients, in the forward's tail."""
    torch.manual_seed(dist.get_rank())
    model = DDP(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        image, text, scale = model(torch.randn(4, 8), torch.randint(12, (4, 3)))
        images, texts = torch.cat(all_gather(image)), torch.cat(all_gather(text))
        labels = torch.arange(len(images))
        logits = scale * images @ texts.T
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            bare(model).logit_scale.clamp_(0, 4.6)
    return state(model=model) | {"loss": loss.item()}
