"""Soft actor-critic (Haarnoja et al., arXiv 1812.05905), with LayerNorm critics and ensembles as in RLPD
(arXiv 2302.02948) and random target subsets as in REDQ (arXiv 2101.05982).

Works on flat features (N, F) and unit-box actions (N, A). In the order of the paper: networks, act, update, losses.
``algo.update=autograd`` runs the plain formulas below; ``fused`` runs the same update with its backward pass by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from control.config import SACConfig, with_defaults
from control.distributions import sample_squashed
from control.fused import FusedActorCritic, Weights, pessimistic
from control.graphs import Graphed
from control.networks import Adam, GreedyActor, actor_mlp, critic_mlp, mean_log_std, not_finite
from control.normalizer import RunningNormalizer
from control.types import Transition


class SAC:
    """Learner (see :class:`control.types.Learner`).

    Args:
        obs_dim: F, features that the critics see.
        act_dim: A.
        actor_dim: the actor sees the first ``actor_dim`` features; None: all.
    """

    def __init__(
        self, obs_dim: int, act_dim: int, config: SACConfig, device: str = "cpu", seed: int = 0,
        actor_dim: int | None = None,
    ) -> None:  # fmt: skip
        cfg: Any = with_defaults(config)
        self.cfg = cfg
        self.act_dim, self.actor_dim = act_dim, actor_dim or obs_dim
        self.target_entropy = -float(act_dim) if cfg.target_entropy is None else cfg.target_entropy
        weights = torch.Generator().manual_seed(seed)
        self.actor = actor_mlp(self.actor_dim, act_dim, cfg.width, cfg.depth, cfg.activation)
        self.critic = critic_mlp(
            obs_dim, act_dim, 1, cfg.width, cfg.depth, cfg.activation, cfg.critic_layer_norm, cfg.critics
        )  # (E, N, 1)
        self.theta_actor = self.actor.init(weights).to(device).requires_grad_()
        self.theta_critic = self.critic.init(weights).to(device).requires_grad_()
        self.theta_target = self.theta_critic.detach().clone()
        self.theta_actor_average = self.theta_actor.detach().clone()  # acts greedily, is exported
        self.log_alpha = torch.tensor([cfg.alpha], device=device).log().requires_grad_()
        self.skipped = torch.zeros((), device=device)  # steps left out because a gradient was not finite
        self.optimizers = {
            "actor": Adam(self.theta_actor, cfg.lr, skipped=self.skipped),
            "critic": Adam(self.theta_critic, cfg.lr, skipped=self.skipped),
            "alpha": Adam(self.log_alpha, cfg.lr_alpha, skipped=self.skipped),
        }
        self.normalizer = RunningNormalizer(obs_dim, device, cfg.normalize)
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        self.updates = 0
        self._metrics: Mapping[str, Tensor] = {}
        self._gradients = _Passes(self, device) if cfg.update == "fused" else self
        self._run = Graphed(self._update, self, device, cfg.update == "fused")

    @torch.no_grad()
    def act(self, obs: Tensor, explore: bool) -> Tensor:
        """(B, F) -> (B, A) in [-1, 1]: a sample, or tanh of the averaged actor's mean."""
        theta = self.theta_actor if explore else self.theta_actor_average
        mean, log_std = self._policy(theta, self.normalizer(obs))
        return sample_squashed(mean, log_std, self._noise(*mean.shape))[0] if explore else mean.tanh()

    def update(self, batch: Transition) -> dict[str, Tensor]:
        """One critic step; every ``policy_delay``-th call also the actor and alpha."""
        self.updates += 1
        with torch.inference_mode(self._gradients is not self):  # by hand: operations keep no books for autograd
            metrics = self._run(normalized(batch, self.normalizer), self.updates % self.cfg.policy_delay == 0)
        self._metrics = {**self._metrics, **metrics}  # those of the actor's last step stay in sight
        return dict(self._metrics)

    def _update(self, batch: Transition, with_actor: bool) -> dict[str, Tensor]:
        # drawn at once: the successors' actions, and the actor's
        noise = self._noise(1 + with_actor, batch.obs.shape[0], self.act_dim)
        loss, q = self._gradients.critic_gradient(batch, noise)
        self.optimizers["critic"].step()
        metrics = {"critic_loss": loss, "q": q.mean()}
        if with_actor:
            metrics |= self._update_actor(batch.obs, noise[1])
        self.theta_target.lerp_(self.theta_critic.detach(), self.cfg.tau)
        return metrics | {"skipped": self.skipped}

    def _update_actor(self, obs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        loss, log_prob = self._gradients.actor_gradient(obs, noise)
        alpha = self.log_alpha.detach().exp()[0]  # the one that the actor's loss used
        entropy = -log_prob.mean()
        self.log_alpha.grad = alpha_grad(entropy, self.target_entropy)
        assert self.theta_actor.grad is not None
        found = not_finite(self.theta_actor.grad, entropy)  # alpha's step and the actor's are made together
        self.skipped += found
        self.optimizers["actor"].step(found)
        self.optimizers["alpha"].step(found)
        self.theta_actor_average.lerp_(self.optimizers["actor"].data, self.cfg.actor_average)
        return {"actor_loss": loss, "entropy": entropy, "alpha": alpha}

    def critic_gradient(self, batch: Transition, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Writes ``theta_critic.grad``; returns the loss and (E, N) values.

        Args:
            noise: (1 or 2, N, A) for the actions at the successors, and those of the actor's step if it follows.
        """
        with torch.no_grad():
            action, log_prob = sample_squashed(*self._policy(self.theta_actor, batch.next_obs), noise[0])
            q = self.critic(self.theta_target, torch.cat([batch.next_obs, action], -1)).squeeze(-1)  # (E, N)
            target = soft_target(batch.reward, batch.discount, self._least(q), log_prob, self.log_alpha.exp())
        q = self.critic(self.theta_critic, torch.cat([batch.obs, batch.action], -1)).squeeze(-1)  # (E, N)
        loss = critic_loss(q, target)
        (self.theta_critic.grad,) = torch.autograd.grad(loss, self.theta_critic)
        return loss.detach(), q.detach()

    def actor_gradient(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Writes ``theta_actor.grad``; returns the loss and (N,) log densities."""
        action, log_prob = sample_squashed(*self._policy(self.theta_actor, obs), noise)
        q = self.critic(self.theta_critic.detach(), torch.cat([obs, action], -1)).squeeze(-1)  # (E, N)
        loss = actor_loss(pessimistic(q), log_prob, self.log_alpha.detach().exp())
        (self.theta_actor.grad,) = torch.autograd.grad(loss, self.theta_actor)
        return loss.detach(), log_prob.detach()

    def _least(self, q: Tensor) -> Tensor:
        """(E, N) -> (N,): the least of ``target_critics`` members, drawn anew for each update if fewer than E."""
        k, members = self.cfg.target_critics, q.shape[0]
        if k == members:
            return q.amin(0)
        draw = torch.rand(members, generator=self.generator, device=q.device).topk(k).indices
        return q.index_select(0, draw).amin(0)

    def _policy(self, theta: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
        output = self.actor(theta, obs[:, : self.actor_dim])
        return mean_log_std(output, self.cfg.log_std_min, self.cfg.log_std_max)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.generator.device)

    def export(self) -> nn.Module:
        """Raw features (B, actor_dim) -> greedy unit actions (B, A), on the CPU."""
        return GreedyActor(self.actor, self.theta_actor_average, self.normalizer)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on; copies."""
        state: dict[str, Any] = {name: getattr(self, name).detach() for name in _TENSORS}
        state["optimizers"] = {name: adam.state_dict() for name, adam in self.optimizers.items()}
        state["normalizer"] = self.normalizer.state_dict()
        state["generator"] = self.generator.get_state()
        state["updates"] = self.updates
        return copy.deepcopy(state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, in place; the sizes must agree."""
        for name in _TENSORS:
            getattr(self, name).copy_(state[name])
        for name, adam in self.optimizers.items():
            adam.load_state_dict(state["optimizers"][name])
        self.normalizer.load_state_dict(state["normalizer"])
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]


_TENSORS = ("theta_actor", "theta_actor_average", "theta_critic", "theta_target", "log_alpha")


class _Passes:
    """:meth:`SAC.critic_gradient` and :meth:`SAC.actor_gradient` with the backward pass by hand."""

    def __init__(self, learner: SAC, device: torch.device | str) -> None:
        cfg, self.learner = learner.cfg, learner
        dtype, log_std = getattr(torch, cfg.precision), (cfg.log_std_min, cfg.log_std_max)
        self.nets = FusedActorCritic(learner.actor, learner.critic, learner.actor_dim, log_std, device, dtype)
        self.w_actor = Weights(learner.actor, learner.theta_actor, dtype, trained=True)
        self.w_critic = Weights(learner.critic, learner.theta_critic, dtype, trained=True)
        self.w_target = Weights(learner.critic, learner.theta_target, dtype, trained=False)

    @torch.no_grad()
    def critic_gradient(self, batch: Transition, noise: Tensor) -> tuple[Tensor, Tensor]:
        """With noise for two, the actor's actions are drawn here as well: its weights are the same until its step."""
        learner, nets, n = self.learner, self.nets, batch.obs.shape[0]
        nets.prepare(n, (self.w_actor, self.w_critic, self.w_target))
        nets.load(batch.obs, batch.next_obs)
        nets.sample(self.w_actor, nets.both if len(noise) == 2 else nets.next, noise.flatten(0, 1))
        q = nets.value(self.w_target, nets.next, nets.next.action)[..., 0]  # (E, N)
        self.alpha = learner.log_alpha.exp()
        target = soft_target(batch.reward, batch.discount, learner._least(q), nets.next.log_prob, self.alpha)
        q = nets.value(self.w_critic, nets.now, batch.action)[..., 0]  # (E, N)
        error = q - target
        nets.critic.grad_output.copy_((error * nets.mean_of).unsqueeze(-1))  # d critic_loss / d q
        nets.critic_backward(self.w_critic)
        error = error.view(-1)
        return error.dot(error) * (nets.mean_of * 0.5), q

    @torch.no_grad()
    def actor_gradient(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """After :meth:`critic_gradient`, whose observations and actions it uses."""
        nets, now = self.nets, self.nets.now
        nets.prepare(obs.shape[0], (self.w_critic,))
        q = nets.value(self.w_critic, now, now.action)[..., 0]  # (E, N)
        least = pessimistic(q)
        nets.actor_backward(self.w_actor, self.w_critic, q, least, self.alpha)
        return actor_loss(least, now.log_prob, self.alpha), now.log_prob


def normalized(batch: Transition, normalizer: RunningNormalizer) -> Transition:
    """The batch with normalised features (the same object when the normaliser is off)."""
    if not normalizer.enabled:
        return batch
    obs, next_obs = normalizer(batch.obs), normalizer(batch.next_obs)
    return Transition(obs, batch.action, batch.reward, batch.discount, next_obs)


def soft_target(reward: Tensor, discount: Tensor, q_next: Tensor, log_prob_next: Tensor, alpha: Tensor) -> Tensor:
    """(N,) r + discount (q' - alpha log pi'), eqs. 3 and 6 of 1812.05905; ``discount`` holds the termination."""
    return torch.addcmul(reward, discount, torch.addcmul(q_next, alpha, log_prob_next, value=-1))


def critic_loss(q: Tensor, target: Tensor) -> Tensor:
    """Half squared error, mean over the batch, summed over the (E, N) critics: eq. 5."""
    return 0.5 * (q - target).square().mean(-1).sum()


def actor_loss(q: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """Mean of alpha log pi - min Q: eq. 9."""
    return (alpha * log_prob - q).mean()


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """-log alpha (log pi + target entropy): eq. 18 with log alpha for alpha, so alpha stays positive."""
    return -(log_alpha * (log_prob + target_entropy).mean()).sum()


def alpha_grad(entropy: Tensor, target_entropy: float) -> Tensor:
    """(1,) derivative of :func:`alpha_loss`, which is linear in log alpha; ``entropy`` is -mean(log pi)."""
    return (entropy - target_entropy).view(1)
