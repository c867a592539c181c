"""Forward and backward passes written by hand, into buffers that are made once: the fast twin of autograd on a CPU.

An update of small networks spends half its time outside matrix products: allocation, autograd's graph, gradients that
nobody reads. Here a network's activations and gradients live in preallocated buffers, and a backward pass computes what
it is asked for. The plain versions in ``sac.py`` and ``dsact.py`` are the oracle of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from control.distributions import LOG_SQRT_2PI
from control.networks import MLP

EPS_LAYER_NORM = 1e-5  # torch's default, as in F.layer_norm
aten = torch.ops.aten


class Backprop:
    """One perceptron (E members) for batches of N rows.

    Args:
        mlp: its shape.
        n: N.
        dtype: of activations and gradients; the parts and inputs given must have it.
    """

    def __init__(
        self, mlp: MLP, n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.mlp, self.step = mlp, 4 if mlp.layer_norm else 2
        shapes = [(mlp.members, n, size) for size in mlp.sizes[1:]]

        def buffers(count: int) -> list[Tensor]:
            return [torch.empty(shape, device=device, dtype=dtype) for shape in shapes[:count]]

        hidden = len(shapes) - 1
        self.product = buffers(hidden + 1)  # h W + b of every layer; the last one is the output
        # what the activation gives; ReLU needs only its output on the way back and works in place
        in_place = mlp.activation == "relu" and not mlp.layer_norm
        self.hidden = self.product[:hidden] if in_place else buffers(hidden)
        self.normed = buffers(hidden) if mlp.layer_norm else []
        self.scaled = self.hidden if mlp.activation == "relu" else (buffers(hidden) if mlp.layer_norm else self.product)
        self.grad = buffers(hidden)
        self.narrow = mlp.members > 1 and mlp.sizes[-1] <= 2 and torch.device(device).type == "cpu"
        self.stats: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * hidden
        self.input = torch.empty(0)

    def forward(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        """(N, I) shared by the members, or (E, N, I) -> (E, N, O), valid until the next call."""
        h = self.input = x.expand(self.mlp.members, -1, -1) if x.dim() == 2 else x
        for i in range(len(self.hidden)):
            weight, offset, *norm = parts[i * self.step : (i + 1) * self.step]
            torch.baddbmm(offset, h, weight, out=self.product[i])
            if norm:
                self._layer_norm(i, norm[0], norm[1])
            h = self._activate(i)
        return self._output(h, parts[-2], parts[-1])

    def backward(self, parts: Sequence[Tensor], grad_output: Tensor, grads: Sequence[Tensor] | None) -> None:
        """From dL/d(output) (E, N, O) to dL/d(parts), written into ``grads`` unless None.

        Leaves dL/d(first product) for :meth:`input_grad`.
        """
        g, h = grad_output, self.hidden[-1]
        if grads is not None:
            self._output_grads(h, g, grads[-2], grads[-1])
        self._to_hidden(g, parts[-2], self.grad[-1])
        for i in reversed(range(len(self.hidden))):
            g = self._through_activation(i, parts, grads)
            h = self.hidden[i - 1] if i else self.input
            if grads is not None:
                torch.bmm(h.transpose(1, 2), g, out=grads[i * self.step])
                torch.sum(g, 1, keepdim=True, out=grads[i * self.step + 1])
            if i:
                torch.bmm(g, parts[i * self.step].transpose(1, 2), out=self.grad[i - 1])

    def input_grad(self, parts: Sequence[Tensor], first: int) -> Tensor:
        """dL/d(input columns from ``first`` on), summed over the members: (N, I - first), after :meth:`backward`."""
        return torch.bmm(self.grad[0], parts[0][:, first:].transpose(1, 2)).sum(0)

    def _layer_norm(self, i: int, gain: Tensor, offset: Tensor) -> None:
        width = self.product[i].shape[-1:]
        normed, mean, rstd = torch.native_layer_norm(self.product[i], width, None, None, EPS_LAYER_NORM)
        self.normed[i], self.stats[i] = normed, (mean, rstd)
        torch.addcmul(offset, normed, gain, out=self.scaled[i])

    def _activate(self, i: int) -> Tensor:
        z, h = self.scaled[i], self.hidden[i]
        if self.mlp.activation == "relu":
            return torch.clamp_min(z, 0, out=h)
        if self.mlp.activation == "tanh":
            return torch.tanh(z, out=h)
        return aten.gelu.out(z, out=h)

    def _through_activation(self, i: int, parts: Sequence[Tensor], grads: Sequence[Tensor] | None) -> Tensor:
        """``self.grad[i]`` from dL/d(hidden) to dL/d(product), in place."""
        g = self.grad[i]
        if self.mlp.activation == "relu":
            aten.threshold_backward.grad_input(g, self.hidden[i], 0, grad_input=g)
        elif self.mlp.activation == "tanh":
            aten.tanh_backward.grad_input(g, self.hidden[i], grad_input=g)
        else:
            aten.gelu_backward.grad_input(g, self.scaled[i], grad_input=g)
        if not self.mlp.layer_norm:
            return g
        if grads is not None:
            torch.sum(g * self.normed[i], 1, keepdim=True, out=grads[i * 4 + 2])
            torch.sum(g, 1, keepdim=True, out=grads[i * 4 + 3])
        g.mul_(parts[i * 4 + 2])
        inputs = (g, self.product[i], g.shape[-1:], *self.stats[i], None, None, (True, False, False))
        return g.copy_(aten.native_layer_norm_backward(*inputs)[0])

    def _output(self, h: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        """The last product. Batched products with one or two columns are six times slower than as many vectors'."""
        out = self.product[-1]
        if not self.narrow:
            return torch.baddbmm(offset, h, weight, out=out)
        for e in range(out.shape[0]):
            for o in range(out.shape[2]):
                torch.mv(h[e], weight[e, :, o], out=out[e, :, o])
        return out.add_(offset)

    def _output_grads(self, h: Tensor, g: Tensor, grad_weight: Tensor, grad_offset: Tensor) -> None:
        torch.sum(g, 1, keepdim=True, out=grad_offset)
        if not self.narrow:
            torch.bmm(h.transpose(1, 2), g, out=grad_weight)
            return
        for e in range(g.shape[0]):
            for o in range(g.shape[2]):
                torch.mv(h[e].t(), g[e, :, o], out=grad_weight[e, :, o])

    @staticmethod
    def _to_hidden(g: Tensor, weight: Tensor, out: Tensor) -> None:
        """dL/d(output) (E, N, O) -> dL/d(hidden) (E, N, H)."""
        if g.shape[-1] == 1:
            torch.mul(g, weight.transpose(1, 2), out=out)
        else:
            torch.bmm(g, weight.transpose(1, 2), out=out)


class Weights:
    """A parameter vector with its gradient: float32 masters, and copies in the precision of the products."""

    def __init__(self, mlp: MLP, theta: Tensor, dtype: torch.dtype, trained: bool) -> None:
        self.theta, self.low = theta.detach(), None if dtype == torch.float32 else theta.detach().to(dtype)
        self.parts = mlp.split(self.theta if self.low is None else self.low)
        self.grad = self.low_grad = None
        if trained:
            self.grad = theta.grad = torch.zeros_like(theta)
            self.low_grad = self.grad if self.low is None else torch.zeros_like(self.low)
            self.grads = mlp.split(self.low_grad)

    def refresh(self) -> None:
        """Follow the masters; free in float32, where they are the same memory."""
        if self.low is not None:
            self.low.copy_(self.theta)

    def publish(self) -> None:
        """Give the gradient to the optimiser; free in float32."""
        if self.grad is not None and self.low_grad is not self.grad and self.low_grad is not None:
            self.grad.copy_(self.low_grad)


class FusedActorCritic:
    """The passes that SAC and DSAC-T are made of.

    Args:
        actor, critic: shapes; the critic takes [obs F | action A].
        actor_dim: the actor sees the first columns of obs.
        log_std: clamp of the log standard deviation.
    """

    def __init__(
        self, actor: MLP, critic: MLP, actor_dim: int, log_std: tuple[float, float], device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.mlps, self.actor_dim, self.log_std = (actor, critic), actor_dim, log_std
        self.device, self.dtype, self.act_dim, self.rows = device, dtype, actor.sizes[-1] // 2, 0

    def prepare(self, n: int, weights: Sequence[Weights]) -> None:
        """Make buffers for batches of ``n`` rows unless they are there, and follow the masters of ``weights``."""
        for one in weights:
            one.refresh()
        if n == self.rows:
            return
        self.rows = n
        self.actor, self.critic = (Backprop(mlp, n, self.device, self.dtype) for mlp in self.mlps)
        self.pair = torch.empty(n, self.mlps[1].sizes[0], device=self.device, dtype=self.dtype)  # (N, F + A)
        self.grad_actor = torch.empty(1, n, 2 * self.act_dim, device=self.device, dtype=self.dtype)

    def sample(self, weights: Weights, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """(N, F) -> unit action (N, A) and its log density (N,); keeps what :meth:`actor_backward` needs."""
        x = obs[:, : self.actor_dim]
        mean, raw = self.actor.forward(weights.parts, x.to(self.dtype)).float()[0].chunk(2, -1)
        log_std = raw.clamp(*self.log_std)
        self.std_noise = log_std.exp().mul_(noise)  # (N, A)
        u = self.std_noise + mean
        self.raw, self.action = raw, u.tanh()
        correction = torch.nn.functional.softplus(-2 * u).add_(u).mul_(2)  # 2 log 2 - log(1 - tanh^2 u)
        per_joint = correction.sub_(log_std).sub_(noise.square().mul_(0.5))
        return self.action, per_joint.sum(-1).sub_(self.act_dim * (LOG_SQRT_2PI + 2 * math.log(2)))

    def value(self, weights: Weights, obs: Tensor, action: Tensor) -> Tensor:
        """(N, F), (N, A) -> critic outputs (E, N, O) float32."""
        f = obs.shape[1]
        self.pair[:, :f].copy_(obs)
        self.pair[:, f:].copy_(action)
        return self.critic.forward(weights.parts, self.pair).float()

    def critic_backward(self, weights: Weights, grad_output: Tensor) -> None:
        """From dL/d(outputs) (E, N, O) to the critic's gradient."""
        self.critic.backward(weights.parts, grad_output.to(self.dtype), weights.grads)
        weights.publish()

    def actor_backward(self, actor: Weights, critic: Weights, grad_value: Tensor, alpha: Tensor) -> None:
        """The actor's gradient of mean(alpha log pi - Q(s, a)), Q as :meth:`value` left it for the sampled action.

        Args:
            grad_value: (E, N, O) d(mean Q)/d(critic outputs).
            alpha: () or (1,) entropy weight.

        With u = mean + std eps and a = tanh u: d log pi / d u = 2 a through the change of variables alone (the Gaussian
        term is a constant of eps), d log pi / d log std = -1 besides.
        """
        n, a = self.action.shape[0], self.action
        self.critic.backward(critic.parts, grad_value.to(self.dtype), None)
        grad_action = self.critic.input_grad(critic.parts, self.pair.shape[1] - self.act_dim).float()  # (N, A)
        entropy = alpha / n
        grad_u = (1 - a.square()).mul_(grad_action).neg_().add_(2 * entropy * a)
        inside = (self.raw >= self.log_std[0]) & (self.raw <= self.log_std[1])
        self.grad_actor[0, :, : self.act_dim].copy_(grad_u)
        self.grad_actor[0, :, self.act_dim :].copy_((grad_u * self.std_noise).sub_(entropy).mul_(inside))
        self.actor.backward(actor.parts, self.grad_actor, actor.grads)
        actor.publish()
