"""Multilayer perceptrons as plain functions of one flat parameter vector.

One vector per network makes the rest short and fast: one fused Adam step, one ``lerp_`` for a target network, and
several members (twin critics) run as one batched product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from control.normalizer import RunningNormalizer

ZERO, ONE = torch.tensor(0.0), torch.tensor(1.0)  # a number of Python costs a small operation twice its time
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}


@dataclass(frozen=True)
class MLP:
    """The shape of E independent perceptrons; the weights live in a vector ``theta`` of ``num_parameters``.

    Attributes:
        members: E.
        sizes: units per layer, input first, output last.
        layer_norm: LayerNorm with gain and offset after each hidden product (before the activation).
        activation: name in :data:`ACTIVATIONS`.
    """

    members: int
    sizes: tuple[int, ...]
    layer_norm: bool = False
    activation: str = "relu"

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the weight, offset (and LayerNorm gain, offset) of every layer, in the order of ``theta``."""
        shapes: list[tuple[int, ...]] = []
        for index, (n_in, n_out) in enumerate(zip(self.sizes[:-1], self.sizes[1:])):
            shapes += [(self.members, n_in, n_out), (self.members, 1, n_out)]
            if self.layer_norm and index < len(self.sizes) - 2:
                shapes += [(self.members, 1, n_out)] * 2
        return shapes

    @cached_property
    def lengths(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def num_parameters(self) -> int:
        return sum(self.lengths)

    def init(self, generator: torch.Generator) -> Tensor:
        """(P,) weights and offsets uniform in +-1/sqrt(fan in), LayerNorm gain 1 and offset 0."""
        theta = torch.zeros(self.num_parameters)
        parts = self.split(theta)
        step = 4 if self.layer_norm else 2
        for start in range(0, len(parts), step):
            weight, offset, *norm = parts[start : start + step]
            bound = 1 / math.sqrt(weight.shape[1])
            weight.uniform_(-bound, bound, generator=generator)
            offset.uniform_(-bound, bound, generator=generator)
            if norm:
                norm[0].fill_(1.0)
        return theta

    def split(self, theta: Tensor) -> list[Tensor]:
        """Views of ``theta`` in the shapes of :attr:`shapes`."""
        return [part.view(shape) for part, shape in zip(theta.split(self.lengths), self.shapes)]

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """(N, sizes[0]) shared by all members -> (E, N, sizes[-1])."""
        return self.forward(self.split(theta), x)

    def forward(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """As :meth:`__call__`, from the parts of :meth:`split`."""
        activation = ACTIVATIONS[self.activation]
        h = x.expand(self.members, -1, -1)  # (E, N, F)
        step = 4 if self.layer_norm else 2
        for start in range(0, len(parts) - 2, step):
            weight, offset, *norm = parts[start : start + step]
            h = torch.baddbmm(offset, h, weight)  # (E, N, H)
            if norm:
                h = torch.addcmul(norm[1], F.layer_norm(h, h.shape[-1:]), norm[0])
            h = activation(h)
        return torch.baddbmm(parts[-1], h, parts[-2])  # (E, N, O)


def orthogonal(mlp: MLP, generator: torch.Generator, last_gain: float) -> Tensor:
    """(P,) orthogonal weights with gain sqrt 2 (the last layer: ``last_gain``) and zero offsets, as PPO wants them."""
    theta = torch.zeros(mlp.num_parameters)
    parts = mlp.split(theta)
    step = 4 if mlp.layer_norm else 2
    for start in range(0, len(parts), step):
        gain = last_gain if start + 2 >= len(parts) else math.sqrt(2)
        for member in parts[start]:
            nn.init.orthogonal_(member, gain, generator=generator)
        if step == 4 and start + 2 < len(parts):
            parts[start + 2].fill_(1.0)
    return theta


def actor_mlp(obs_dim: int, act_dim: int, width: int, depth: int, activation: str) -> MLP:
    """Features -> mean and log standard deviation of the pre-squash Gaussian, as one output of 2 A."""
    return MLP(1, (obs_dim, *[width] * depth, 2 * act_dim), False, activation)


def critic_mlp(
    obs_dim: int,
    act_dim: int,
    outputs: int,
    width: int,
    depth: int,
    activation: str,
    layer_norm: bool,
    members: int = 2,
) -> MLP:
    """Features and action -> ``outputs`` per critic, ``members`` critics."""
    return MLP(members, (obs_dim + act_dim, *[width] * depth, outputs), layer_norm, activation)


def mean_log_std(output: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Actor output (1, N, 2 A) -> mean (N, A) and clamped log standard deviation (N, A)."""
    mean, log_std = output.squeeze(0).chunk(2, dim=-1)
    return mean, log_std.clamp(low, high)


class Adam:
    """Fused Adam (Kingma & Ba, arXiv 1412.6980) over one flat vector: the kernel of ``torch.optim.Adam(fused=True)``.

    The kernel is called without the optimiser around it, which takes 80 us a step. A step with a gradient that is not
    finite changes nothing and is counted in ``skipped`` (which several may share), without asking the host.
    """

    def __init__(
        self, theta: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        skipped: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.theta, self.lr, self.betas, self.eps = theta, lr, betas, eps
        data = self.data = theta.detach()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(data), torch.zeros_like(data)
        self.count = torch.zeros((), device=theta.device)
        self.skipped = torch.zeros((), device=theta.device) if skipped is None else skipped

    def descend(self, loss: Tensor) -> None:
        """One step down the gradient of ``loss`` with respect to this vector alone."""
        (self.theta.grad,) = torch.autograd.grad(loss, self.theta)
        self.step()

    def step(self, found: Tensor | None = None) -> None:
        """One step down ``theta.grad``.

        Args:
            found: () 1 to leave the step out, which somebody else counts, or 0; None: as :func:`not_finite` finds.
        """
        assert self.theta.grad is not None
        if found is None:
            found = not_finite(self.theta.grad)
            self.skipped += found
        self.count.add_(ONE).sub_(found)
        torch._fused_adam_(
            [self.data], [self.theta.grad], [self.exp_avg], [self.exp_avg_sq], [], [self.count], lr=self.lr,
            beta1=self.betas[0], beta2=self.betas[1], weight_decay=0.0, eps=self.eps, amsgrad=False, maximize=False,
            found_inf=found,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Tensor]:
        names = ("exp_avg", "exp_avg_sq", "count", "skipped")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """In place: captured graphs keep their addresses."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])


def not_finite(grad: Tensor, *others: Tensor) -> Tensor:
    """() 1 if an element of (P,) or one of the others () is not finite, else 0, without asking the host.

    Nor if the square of their sum is not, which would leave an infinite second moment for ever.
    """
    total = grad.sum()
    for other in others:
        total += other
    total.mul_(total)
    return (total - total).ne_(ZERO)  # inf - inf and nan - nan are nan, which differs from 0


class GreedyActor(nn.Module):
    """Raw features (B, F) -> greedy unit action (B, A): what a squashed Gaussian's learner exports."""

    shift: Tensor
    scale: Tensor

    def __init__(self, mlp: MLP, theta: Tensor, normalizer: RunningNormalizer) -> None:
        super().__init__()
        self.mlp, self.features = mlp, mlp.sizes[0]
        parts = mlp.split(theta.detach().cpu().clone())
        self.weights = nn.ParameterList([nn.Parameter(p.clone(), requires_grad=False) for p in parts])
        self.normalize = normalizer.enabled
        self.register_buffer("shift", normalizer.shift[: self.features].cpu().clone())
        self.register_buffer("scale", normalizer.scale[: self.features].cpu().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.normalize:
            x = ((x - self.shift) * self.scale).clamp(-10, 10)
        return self.mlp.forward(list(self.weights), x)[0].chunk(2, -1)[0].tanh()
