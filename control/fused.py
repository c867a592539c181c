"""Forward and backward passes written by hand, into buffers that are made once: the fast twin of autograd on a CPU.

An update of small networks spends half its time outside matrix products: allocation, autograd's graph, gradients that
nobody reads, views that are made again and again. Here activations, gradients and every view of them are made once,
and a backward pass computes what it is asked for. The plain versions in ``sac.py`` and ``dsact.py`` are the oracle of
the tests.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from control.distributions import LOG_SQRT_2PI
from control.networks import MLP

EPS_LAYER_NORM = 1e-5  # torch's default, as in F.layer_norm
MINUS_ONE = torch.tensor(-1.0)  # a number of Python costs an operation twice its time
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
        self.weight_t_of = [list(weight) for weight in self.weight_t]  # by layer and member
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
        self.normed: list[tuple[Tensor, Tensor, Tensor]] = [(torch.empty(0),) * 3] * hidden  # and mean, 1 / deviation
        self.grad = buffers(hidden)
        # up to eight columns of output, written row by row, cost MKL four times what they cost column by column
        self.slim = mlp.members == 1 and 2 <= mlp.sizes[-1] <= 8 and torch.device(device).type == "cpu"
        if self.slim:
            self.product[-1] = self.product[-1].mT.contiguous().mT
            self.grad_columnwise = self.product[-1].new_zeros(1, mlp.sizes[-1], mlp.sizes[-2]).mT
        # a batched product with one or two columns is six times slower than as many matrix-vector products
        single = dtype == torch.float32 and torch.device(device).type == "cpu"
        self.narrow = single and mlp.members > 1 and mlp.sizes[-1] <= 2
        self.grad_output = torch.zeros_like(self.product[-1])
        self.input = self.input_t = torch.empty(0)
        self._make_views()

    def _make_views(self) -> None:
        self.output = self.product[-1]
        self.hidden_t = [h.transpose(1, 2) for h in self.hidden]
        self.rows, self.rows_t = list(self.hidden[-1]), list(self.hidden_t[-1])
        gelu = self.mlp.activation == "gelu"
        self.activated = [list(x) for x in (self.scaled if gelu else self.hidden)]  # by layer and member
        self.columns, self.grad_columns = _columns(self.output), _columns(self.grad_output)

    def part(self, rows: slice) -> Backprop:
        """The same buffers for some of the rows: what :meth:`forward` of all wrote, ``backward`` of a part reads."""
        assert not self.mlp.layer_norm, "what a LayerNorm leaves for the way back belongs to all rows"
        part = copy.copy(self)
        part.product, part.hidden, part.scaled, part.grad = (
            [x[:, rows] for x in buffers] for buffers in (self.product, self.hidden, self.scaled, self.grad)
        )
        part.grad_output = self.grad_output[:, rows]
        if len(self.input):
            part.set_input(self.input[:, rows])
        part._make_views()
        return part

    def set_input(self, x: Tensor) -> None:
        """(N, I) shared by the members, or (E, N, I); read again by every :meth:`forward`."""
        self.input, self.input_t = self.input_views(x)

    def input_views(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`set_input` makes of it, for those who take turns."""
        x = x.expand(self.mlp.members, -1, -1) if x.dim() == 2 else x
        return x, x.transpose(1, 2)

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

    def input_grad_of_chosen(self, weights: Weights, first_member: Tensor, scale: float, first: int) -> Tensor:
        """As :meth:`input_grad` for ``scale`` times the first output of one of two members per row: half the work.

        Args:
            first_member: (N,) whether a row is of the first of them. Shapes depend on values: for the CPU.
        """
        members = (first_member.nonzero().view(-1), first_member.logical_not().nonzero().view(-1))
        grads = []
        for e, rows in enumerate(members):
            g = (weights.columns[e * self.mlp.sizes[-1]][1] * scale).expand(len(rows), -1)
            for i in reversed(range(len(self.hidden))):
                g = self._through_activation_of(i, e, rows, weights, g)
                weight_t = weights.weight_t_of[i][e]
                g = g @ (weight_t if i else weight_t[:, first:])
            grads.append(g)
        joined = torch.cat(grads)
        return torch.empty_like(joined).index_copy_(0, torch.cat(members), joined)

    def _through_activation_of(self, i: int, e: int, rows: Tensor, weights: Weights, g: Tensor) -> Tensor:
        """(n, H) dL/d(hidden) of member ``e`` at ``rows`` -> dL/d(product)."""
        kept = self.activated[i][e].index_select(0, rows)
        if self.mlp.activation == "relu":
            g = aten.threshold_backward(g, kept, 0)
        elif self.mlp.activation == "tanh":
            g = aten.tanh_backward(g, kept)
        else:
            g = aten.gelu_backward(g, kept)
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
            return h.relu_()  # z and h are one; half the time of clamp_min
        if self.mlp.activation == "tanh":
            if self.gain == 1:
                return torch.tanh(z, out=h)
            return torch.add(MINUS_ONE, z.sigmoid_(), alpha=2, out=h)
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
        self.log_prob_offset = torch.tensor(-self.act_dim * (LOG_SQRT_2PI + 2 * math.log(2)), device=device)

    def prepare(self, n: int, weights: Sequence[Weights]) -> None:
        """Make buffers for batches of ``n`` rows unless they are there, and follow the masters of ``weights``."""
        for one in weights:
            one.refresh()
        if n == self.rows:
            return
        self.rows, f, a = n, self.mlps[1].sizes[0] - self.act_dim, self.act_dim
        self.critic = Backprop(self.mlps[1], n, self.device, self.dtype)
        actor = Backprop(self.mlps[0], 2 * n, self.device, self.dtype)
        pair = torch.zeros(2 * n, f + a, device=self.device, dtype=self.dtype)  # [obs F | action A]
        actor.set_input(pair[:, : self.actor_dim])  # a view: the actor reads the observation of the pair
        action, std_noise = (torch.zeros(2 * n, a, device=self.device) for _ in range(2))
        log_prob = torch.zeros(2 * n, device=self.device)
        self.both = Rows(actor, pair, f, action, std_noise, log_prob)
        self.next, self.now = (
            Rows(actor.part(s), pair[s], f, action[s], std_noise[s], log_prob[s]) for s in (slice(n), slice(n, 2 * n))
        )
        for rows in (self.next, self.now):
            rows.critic_input = self.critic.input_views(rows.pair)
        self.mean_of = torch.tensor(1 / n)  # times it: a mean over the batch

    def load(self, obs: Tensor, next_obs: Tensor) -> None:
        """(N, F) each."""
        self.next.obs.copy_(next_obs)
        self.now.obs.copy_(obs)

    def sample(self, weights: Weights, rows: Rows, noise: Tensor) -> None:
        """A squashed Gaussian action for every observation of ``rows`` from ``noise`` of its shape.

        log pi = sum over A of [2 (u + softplus(-2 u)) - log std - eps^2 / 2] - A (log sqrt(2 pi) + 2 log 2).
        """
        rows.actor.forward(weights)
        rows.mean, rows.raw = (x.float() for x in rows.output)  # the same tensors in float32
        log_std = rows.raw.clamp(*self.log_std_range)
        torch.exp(log_std, out=rows.std_noise).mul_(noise)
        u = rows.std_noise + rows.mean
        torch.tanh(u, out=rows.action)
        v = torch.sub(u, softplus(u, -2.0), alpha=2)  # with beta = -2 it is -softplus(-2 u) / 2
        minus = torch.sub(log_std, v, alpha=2).addcmul_(noise, noise, value=0.5)
        torch.sub(self.log_prob_offset, minus.sum(-1), out=rows.log_prob)

    def value(self, weights: Weights, rows: Rows, action: Tensor) -> Tensor:
        """Critic outputs (E, N, O) in float32 at the observations of ``rows`` and (N, A)."""
        rows.pair_action.copy_(action)
        self.critic.input, self.critic.input_t = rows.critic_input
        return self.critic.forward(weights).float()

    def critic_backward(self, weights: Weights) -> None:
        """From ``critic.grad_output`` to the critic's gradient."""
        self.critic.backward(weights)
        weights.publish()

    def actor_backward(self, actor: Weights, critic: Weights, q: Tensor, value: Tensor, alpha: Tensor) -> None:
        """The actor's gradient of mean(alpha log pi - value(s, a)) at ``now``, the critics as :meth:`value` left them.

        Args:
            q: (E, N) values of the critics at the sampled action; ``value`` (N,) is ``pessimistic(q)``.
            alpha: () or (1,) entropy weight.

        With u = mean + std eps and a = tanh u: d log pi / d u = 2 a through the change of variables alone (the Gaussian
        term is a constant of eps), d log pi / d log std = -1 besides.
        """
        rows = self.now
        first = rows.obs.shape[1]
        if self.choose:
            grad_action = self.critic.input_grad_of_chosen(critic, q[0] <= q[1], -1 / self.rows, first).float()
        else:
            self.critic.grad_output.zero_()[..., 0] = pessimistic_grad(q, value).div_(-self.rows)
            self.critic.backward(critic, with_weights=False)
            grad_action = self.critic.input_grad(critic, first).float()  # (N, A): -dQ/da
        entropy, a = alpha * self.mean_of, rows.action
        grad_action.addcmul_(a * a, grad_action, value=-1)  # -(1 - a^2) dQ/da
        grad_u = grad_action.addcmul_(a, entropy, value=2)
        rows.grad_mean.copy_(grad_u)
        grad_log_std = grad_u.mul_(rows.std_noise).sub_(entropy)
        # the clamp lets no gradient through where it acts
        rows.grad_raw.copy_(aten.hardtanh_backward(grad_log_std, rows.raw, *self.log_std_range))
        rows.actor.backward(actor)
        actor.publish()


class Rows:
    """Views of some rows of the buffers of :class:`FusedActorCritic`: observations, and the actor's actions there.

    Attributes:
        actor: its passes over these rows.
        action: (N, A) unit actions drawn last; ``log_prob`` (N,) their log densities.
        std_noise: (N, A) std times noise; ``mean``, ``raw`` (N, A) what the actor gave: mean, log std before its clamp.
    """

    def __init__(
        self, actor: Backprop, pair: Tensor, obs_dim: int, action: Tensor, std_noise: Tensor, log_prob: Tensor
    ) -> None:
        self.actor, self.action, self.std_noise, self.log_prob = actor, action, std_noise, log_prob
        self.obs, self.pair_action = pair[:, :obs_dim], pair[:, obs_dim:]
        self.pair, self.critic_input = pair, (pair, pair)
        a = action.shape[1]
        head, grad = actor.output[0], actor.grad_output[0]  # (N, 2 A) each
        self.output = (head[:, :a], head[:, a:])
        self.mean, self.raw = self.output
        self.grad_mean, self.grad_raw = grad[:, :a], grad[:, a:]


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
