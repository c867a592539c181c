"""Forward and backward passes written by hand, into buffers that are made once: the fast twin of autograd on a CPU.

An update of small networks spends half its time outside matrix products: allocation, autograd's graph, gradients that
nobody reads, views that are made again and again. Here activations, gradients and every view of them are made once,
and a backward pass computes what it is asked for. The plain versions in ``sac.py`` and ``dsact.py`` are the oracle of
the tests.
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


class Weights:
    """A parameter vector with its gradient: float32 masters, and copies in the precision of the products.

    Args:
        trained: has a gradient, in ``grad`` if given (a part of a longer one), else in ``theta.grad``.
    """

    def __init__(
        self, mlp: MLP, theta: Tensor, dtype: torch.dtype = torch.float32, trained: bool = True,
        grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        step = 4 if mlp.layer_norm else 2
        self.theta, self.low = theta.detach(), None if dtype == torch.float32 else theta.detach().to(dtype)
        parts = mlp.split(self.theta if self.low is None else self.low)
        self.layers = [parts[i : i + step] for i in range(0, len(parts), step)]
        self.weight_t = [layer[0].transpose(1, 2) for layer in self.layers]  # (E, out, in)
        self.columns = _columns(parts[-2])
        self.grad = self.low_grad = None
        if trained:
            if grad is None:
                grad = theta.grad = torch.zeros_like(self.theta)
            self.grad = grad
            self.low_grad = self.grad if self.low is None else torch.zeros_like(self.low)
            grads = mlp.split(self.low_grad)
            self.grads = [grads[i : i + step] for i in range(0, len(grads), step)]
            self.grad_columns = _columns(grads[-2])

    def refresh(self) -> None:
        """Follow the masters; free in float32, where they are the same memory."""
        if self.low is not None:
            self.low.copy_(self.theta)

    def publish(self) -> None:
        """Give the gradient to the optimiser; free in float32."""
        if self.low is not None and self.grad is not None and self.low_grad is not None:
            self.grad.copy_(self.low_grad)


class Backprop:
    """One perceptron (E members) for batches of N rows.

    Args:
        mlp: its shape.
        n: N.
        dtype: of activations and gradients; weights and inputs given must have it.

    Attributes:
        output: (E, N, O) what :meth:`forward` wrote last.
        grad_output: (E, N, O) to be filled with dL/d(output) before :meth:`backward`.
    """

    def __init__(
        self, mlp: MLP, n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.mlp = mlp
        shapes = [(mlp.members, n, size) for size in mlp.sizes[1:]]
        hidden = len(shapes) - 1

        def buffers(count: int) -> list[Tensor]:
            return [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes[:count]]

        self.product = buffers(hidden + 1)  # h W + b of every layer; the last one is the output
        # what the activation gives; ReLU and tanh need only their output on the way back and work in place
        in_place = mlp.activation in ("relu", "tanh")
        self.hidden = self.product[:hidden] if in_place and not mlp.layer_norm else buffers(hidden)
        self.scaled = self.hidden if in_place else (buffers(hidden) if mlp.layer_norm else self.product)
        # on a CPU tanh z is slow and 2 sigmoid(2 z) - 1 is not: the same within 2e-7; the product gives 2 z at once
        sigmoid = mlp.activation == "tanh" and not mlp.layer_norm and dtype == torch.float32
        self.gain = 2 if sigmoid and torch.device(device).type == "cpu" else 1
        self.minus_one = torch.tensor(-1.0)
        self.normed: list[tuple[Tensor, Tensor, Tensor]] = [(torch.empty(0),) * 3] * hidden  # and mean, 1 / deviation
        self.grad = buffers(hidden)
        # up to eight columns of output, written row by row, cost MKL four times what they cost column by column
        self.slim = mlp.members == 1 and 2 <= mlp.sizes[-1] <= 8 and torch.device(device).type == "cpu"
        if self.slim:
            self.product[-1] = self.product[-1].mT.contiguous().mT
            self.grad_columnwise = self.product[-1].new_zeros(1, mlp.sizes[-1], mlp.sizes[-2]).mT
        self.output, self.grad_output = self.product[-1], torch.zeros_like(self.product[-1])
        self.hidden_t = [h.transpose(1, 2) for h in self.hidden]
        self.input = self.input_t = torch.empty(0)
        # a batched product with one or two columns is six times slower than as many matrix-vector products
        self.narrow = mlp.members > 1 and mlp.sizes[-1] <= 2 and torch.device(device).type == "cpu"
        self.rows, self.rows_t = list(self.hidden[-1]), list(self.hidden_t[-1])
        self.columns, self.grad_columns = _columns(self.output), _columns(self.grad_output)

    def set_input(self, x: Tensor) -> None:
        """(N, I) shared by the members, or (E, N, I); read again by every :meth:`forward`."""
        self.input = x.expand(self.mlp.members, -1, -1) if x.dim() == 2 else x
        self.input_t = self.input.transpose(1, 2)

    def forward(self, weights: Weights) -> Tensor:
        """-> output (E, N, O), valid until the next call."""
        h = self.input
        for i in range(len(self.hidden)):
            layer = weights.layers[i]
            torch.baddbmm(layer[1], h, layer[0], beta=self.gain, alpha=self.gain, out=self.product[i])
            if self.mlp.layer_norm:
                self._layer_norm(i, layer[2], layer[3])
            h = self._activate(i)
        weight, offset = weights.layers[-1]
        if not self.narrow:
            return torch.baddbmm(offset, h, weight, out=self.output)
        for (e, column), out in zip(weights.columns, self.columns):
            torch.mv(self.rows[e], column, out=out[1])
        return self.output.add_(offset)

    def backward(self, weights: Weights, with_weights: bool = True) -> None:
        """From ``grad_output`` to the gradient of the weights, unless only that of the input is wanted.

        Leaves dL/d(first product) for :meth:`input_grad`.
        """
        g, last = self.grad_output, len(self.hidden)
        if with_weights:
            self._output_grads(weights)
        if self.mlp.sizes[-1] == 1:
            torch.mul(g, weights.weight_t[last], out=self.grad[-1])
        else:
            torch.bmm(g, weights.weight_t[last], out=self.grad[-1])
        for i in reversed(range(last)):
            self._through_activation(i, weights, with_weights)
            g = self.grad[i]
            if with_weights:
                torch.bmm(self.hidden_t[i - 1] if i else self.input_t, g, out=weights.grads[i][0])
                torch.sum(g, 1, keepdim=True, out=weights.grads[i][1])
            if i:
                torch.bmm(g, weights.weight_t[i], out=self.grad[i - 1])

    def input_grad(self, weights: Weights, first: int) -> Tensor:
        """dL/d(input columns from ``first`` on), summed over the members: (N, I - first), after :meth:`backward`."""
        return torch.bmm(self.grad[0], weights.weight_t[0][:, :, first:]).sum(0)

    def input_grad_of_chosen(self, weights: Weights, chosen: Tensor, scale: float, first: int) -> Tensor:
        """As :meth:`input_grad` for ``scale`` times the first output of one member per row: half the work of two.

        Args:
            chosen: (N,) member of each row. Its rows are gathered, so shapes depend on values: for the CPU.
        """
        result = torch.empty(chosen.shape[0], weights.weight_t[0].shape[2] - first, dtype=weights.weight_t[0].dtype)
        for e in range(self.mlp.members):
            rows = (chosen == e).nonzero().squeeze(-1)
            column = weights.layers[-1][0][e, :, 0]
            g = (column * scale).expand(len(rows), -1).contiguous()
            for i in reversed(range(len(self.hidden))):
                g = self._through_activation_of(i, e, rows, weights, g)
                weight_t = weights.weight_t[i][e]
                g = g @ (weight_t if i else weight_t[:, first:])
            result.index_copy_(0, rows, g)
        return result

    def _through_activation_of(self, i: int, e: int, rows: Tensor, weights: Weights, g: Tensor) -> Tensor:
        """(n, H) dL/d(hidden) of member ``e`` at ``rows`` -> dL/d(product)."""
        kept = (self.scaled if self.mlp.activation == "gelu" else self.hidden)[i][e].index_select(0, rows)
        if self.mlp.activation == "relu":
            aten.threshold_backward.grad_input(g, kept, 0, grad_input=g)
        elif self.mlp.activation == "tanh":
            aten.tanh_backward.grad_input(g, kept, grad_input=g)
        else:
            aten.gelu_backward.grad_input(g, kept, grad_input=g)
        if not self.mlp.layer_norm:
            return g
        g.mul_(weights.layers[i][2][e])
        product, mean, rstd = (x[e].index_select(0, rows) for x in (self.product[i], *self.normed[i][1:]))
        return aten.native_layer_norm_backward(g, product, g.shape[-1:], mean, rstd, None, None, (True, False, False))[
            0
        ]

    def _output_grads(self, weights: Weights) -> None:
        torch.sum(self.grad_output, 1, keepdim=True, out=weights.grads[-1][1])
        if self.slim:
            torch.bmm(self.hidden_t[-1], self.grad_output, out=self.grad_columnwise)
            weights.grads[-1][0].copy_(self.grad_columnwise)
            return
        if not self.narrow:
            torch.bmm(self.hidden_t[-1], self.grad_output, out=weights.grads[-1][0])
            return
        for (e, g), out in zip(self.grad_columns, weights.grad_columns):
            torch.mv(self.rows_t[e], g, out=out[1])

    def _layer_norm(self, i: int, gain: Tensor, offset: Tensor) -> None:
        width = (self.mlp.sizes[i + 1],)
        self.normed[i] = torch.native_layer_norm(self.product[i], width, None, None, EPS_LAYER_NORM)
        torch.addcmul(offset, self.normed[i][0], gain, out=self.scaled[i])

    def _activate(self, i: int) -> Tensor:
        z, h = self.scaled[i], self.hidden[i]
        if self.mlp.activation == "relu":
            return torch.clamp_min(z, 0, out=h)
        if self.mlp.activation == "tanh":
            if self.gain == 1:
                return torch.tanh(z, out=h)
            return torch.add(self.minus_one, z.sigmoid_(), alpha=2, out=h)
        return aten.gelu.out(z, out=h)

    def _through_activation(self, i: int, weights: Weights, with_weights: bool) -> None:
        """``self.grad[i]`` from dL/d(hidden) to dL/d(product), in place."""
        g = self.grad[i]
        if self.mlp.activation == "relu":
            aten.threshold_backward.grad_input(g, self.hidden[i], 0, grad_input=g)
        elif self.mlp.activation == "tanh":
            aten.tanh_backward.grad_input(g, self.hidden[i], grad_input=g)
        else:
            aten.gelu_backward.grad_input(g, self.scaled[i], grad_input=g)
        if not self.mlp.layer_norm:
            return
        normed, mean, rstd = self.normed[i]
        if with_weights:
            torch.sum(g * normed, 1, keepdim=True, out=weights.grads[i][2])
            torch.sum(g, 1, keepdim=True, out=weights.grads[i][3])
        g.mul_(weights.layers[i][2])
        inputs = (g, self.product[i], g.shape[-1:], mean, rstd, None, None, (True, False, False))
        g.copy_(aten.native_layer_norm_backward(*inputs)[0])


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
        self.mlps, self.actor_dim, self.log_std_range = (actor, critic), actor_dim, log_std
        self.device, self.dtype, self.act_dim, self.rows = device, dtype, actor.sizes[-1] // 2, 0
        # two critics, of which the least counts: each row's gradient flows through one of them
        self.choose = critic.members == 2 and torch.device(device).type == "cpu"
        self.log_prob_offset = -self.act_dim * (LOG_SQRT_2PI + 2 * math.log(2))

    def prepare(self, n: int, weights: Sequence[Weights]) -> None:
        """Make buffers for batches of ``n`` rows unless they are there, and follow the masters of ``weights``."""
        for one in weights:
            one.refresh()
        if n == self.rows:
            return
        self.rows, f, a = n, self.mlps[1].sizes[0] - self.act_dim, self.act_dim
        self.actor, self.critic = (Backprop(mlp, n, self.device, self.dtype) for mlp in self.mlps)
        pair = torch.zeros(n, f + a, device=self.device, dtype=self.dtype)  # (N, F + A)
        self.obs, self.pair_action = pair[:, :f], pair[:, f:]
        self.critic.set_input(pair)
        self.actor.set_input(pair[:, : self.actor_dim])  # a view: the actor reads the observation of the pair
        head, grad = self.actor.output[0], self.actor.grad_output[0]  # (N, 2 A) each
        self.mean_raw = (head[:, :a], head[:, a:])
        self.grad_mean, self.grad_raw = grad[:, :a], grad[:, a:]

    def sample(self, weights: Weights, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """(N, F) -> unit action (N, A) and its log density (N,); keeps what :meth:`actor_backward` needs.

        log pi = sum over A of [2 (u + softplus(-2 u)) - log std - eps^2 / 2] - A (log sqrt(2 pi) + 2 log 2).
        """
        self.obs.copy_(obs)
        self.actor.forward(weights)
        mean, self.raw = (x.float() for x in self.mean_raw)  # the same tensors in float32
        self.log_std = self.raw.clamp(*self.log_std_range)
        self.std_noise = self.log_std.exp().mul_(noise)  # (N, A)
        u = self.std_noise + mean
        self.action = u.tanh()
        v = torch.nn.functional.softplus(u * -2).add_(u)
        minus = torch.sub(self.log_std, v, alpha=2).addcmul_(noise, noise, value=0.5)
        return self.action, torch.rsub(minus.sum(-1), self.log_prob_offset)

    def value(self, weights: Weights, obs: Tensor | None, action: Tensor) -> Tensor:
        """(N, F) or None for the one that :meth:`sample` read, and (N, A) -> critic outputs (E, N, O) float32."""
        if obs is not None:
            self.obs.copy_(obs)
        self.pair_action.copy_(action)
        return self.critic.forward(weights).float()

    def critic_backward(self, weights: Weights) -> None:
        """From ``critic.grad_output`` to the critic's gradient."""
        self.critic.backward(weights)
        weights.publish()

    def actor_backward(self, actor: Weights, critic: Weights, q: Tensor, value: Tensor, alpha: Tensor) -> None:
        """The actor's gradient of mean(alpha log pi - value(s, a)), the critics as :meth:`value` left them.

        Args:
            q: (E, N) values of the critics at the sampled action; ``value`` (N,) is ``pessimistic(q)``.
            alpha: () or (1,) entropy weight.

        With u = mean + std eps and a = tanh u: d log pi / d u = 2 a through the change of variables alone (the Gaussian
        term is a constant of eps), d log pi / d log std = -1 besides.
        """
        first = self.obs.shape[1]
        if self.choose:
            grad_action = self.critic.input_grad_of_chosen(critic, q.argmin(0), 1 / self.rows, first).float()
        else:
            self.critic.grad_output.zero_()[..., 0] = pessimistic_grad(q, value).div_(self.rows)
            self.critic.backward(critic, with_weights=False)
            grad_action = self.critic.input_grad(critic, first).float()  # (N, A)
        entropy, a = alpha / self.rows, self.action
        grad_u = torch.addcmul(grad_action, a.square(), grad_action, value=-1)  # (1 - a^2) dQ/da
        grad_u = torch.sub(a * (2 * entropy), grad_u)
        self.grad_mean.copy_(grad_u)
        inside = self.log_std == self.raw  # the clamp lets no gradient through where it acts
        self.grad_raw.copy_(grad_u.mul_(self.std_noise).sub_(entropy).mul_(inside))
        self.actor.backward(actor)
        actor.publish()


def _columns(array: Tensor) -> list[tuple[int, Tensor]]:
    """(member, column) views of an (E, R, C) array."""
    return [(e, array[e, :, c]) for e in range(array.shape[0]) for c in range(array.shape[2])]


def pessimistic(q: Tensor) -> Tensor:
    """(E, N) -> (N,): what the actor climbs: the least of two critics, the mean of an ensemble (RLPD, algorithm 1)."""
    return q.amin(0) if q.shape[0] <= 2 else q.mean(0)


def pessimistic_grad(q: Tensor, value: Tensor) -> Tensor:
    """(E, N) d sum(value) / d q for ``value = pessimistic(q)``; critics that tie share it."""
    if q.shape[0] > 2:
        return torch.full_like(q, 1 / q.shape[0])
    least = (q == value).float()
    return least.div_(least.sum(0))
