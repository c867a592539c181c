"""Functions that turn observation groups into one flat input. Torch, and exportable to ONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sims.errors import unknown_choice
from sims.types import EnvSpec
from sims.worlds.robots import SO101

Features = Callable[[Mapping[str, Tensor]], Tensor]

_HOME = tuple(j.home for j in SO101.joints)
_NOT_FLAT = ("pixels/", "instruction", "privileged")


def concat(obs: Mapping[str, Tensor]) -> Tensor:
    """All float groups that a policy may see, flattened, in alphabetical order of their names. (B, F)"""
    groups = [obs[name].flatten(1).float() for name in sorted(obs) if not name.startswith(_NOT_FLAT)]
    return torch.cat(groups, dim=-1)


class _Hand:
    """The parts of ``proprio`` by name, each (B, n), and the moving fingertip, which follows from them."""

    def __init__(self, proprio: Tensor):
        self.q, self.velocity, self.lead = proprio[:, 0:6], proprio[:, 6:12], proprio[:, 12:18]
        self.tip, self.grasp = proprio[:, 18:21], proprio[:, 21:24]
        self.approach, self.closing = proprio[:, 24:27], proprio[:, 27:30]
        self.jaw_tip = self.grasp + self._to_jaw_tip()
        self.turn = _unit(self.closing[:, 0:2])

    def _to_jaw_tip(self) -> Tensor:
        # the jaw turns about an axis that lies along -y of the hand frame (closing, approach x closing, -approach)
        c, s = torch.cos(self.q[:, 5:6]), torch.sin(self.q[:, 5:6])
        (px, py, pz), (jx, jy, jz), (gx, gy, gz) = SO101.links[5].position, SO101.jaw_tip, SO101.grasp
        x, y, z = c * jx - s * jy + (px - gx), py - jz - gy, s * jx + c * jy + (pz - gz)
        up = -self.approach
        return x * self.closing + y * _cross(up, self.closing) + z * up

    def flat(self) -> Tensor:
        """(B, 32)"""
        home = torch.tensor(_HOME, dtype=self.q.dtype, device=self.q.device)
        pan = self.q[:, 0:1]
        scaled = [self.q - home, 0.3 * self.velocity, 5 * self.lead, 5 * self.tip, 5 * self.grasp]
        return torch.cat([*scaled, self.approach, self.closing, torch.sin(pan), torch.cos(pan)], dim=-1)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    ax, ay, az, bx, by, bz = a[:, 0:1], a[:, 1:2], a[:, 2:3], b[:, 0:1], b[:, 1:2], b[:, 2:3]
    return torch.cat([ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx], dim=-1)


def _unit(v: Tensor) -> Tensor:
    """(B, 2) directions; shorter than about 1 mm they fade to zero instead of jumping."""
    return v / torch.sqrt((v * v).sum(-1, keepdim=True) + 1e-6)


def _double(a: Tensor) -> Tensor:
    """(B, 2) cos and sin of an angle -> of twice the angle."""
    c, s = a[:, 0:1], a[:, 1:2]
    return torch.cat([c * c - s * s, 2 * c * s], dim=-1)


def _minus(a: Tensor, b: Tensor) -> Tensor:
    """(B, 2) cos and sin of the difference of two angles given so."""
    ac, a_s, bc, bs = a[:, 0:1], a[:, 1:2], b[:, 0:1], b[:, 1:2]
    return torch.cat([ac * bc + a_s * bs, a_s * bc - ac * bs], dim=-1)


def _turned(v: Tensor, u: Tensor) -> Tensor:
    """Horizontal part of (B, 3) vectors along the directions ``u`` (B, 2) and across."""
    return torch.cat([v[:, 0:1] * u[:, 0:1] + v[:, 1:2] * u[:, 1:2], v[:, 1:2] * u[:, 0:1] - v[:, 0:1] * u[:, 1:2]], -1)


def _relative(hand: _Hand, point: Tensor) -> list[Tensor]:
    return [10 * (point - hand.tip), 10 * (point - hand.grasp), 10 * (point - hand.jaw_tip)]


def _object(hand: _Hand, marker: Tensor, point: Tensor, velocity: Tensor, yaw4: Tensor) -> list[Tensor]:
    """Everything about one object, relative to hand and marker; 20 numbers."""
    facing = _minus(yaw4, _double(_double(hand.turn)))
    return [*_relative(hand, point), 10 * (marker - point), 5 * point, velocity, facing]


def _path(hand: _Hand, marker: Tensor, point: Tensor, velocity: Tensor, yaw4: Tensor) -> list[Tensor]:
    """Hand and object seen along the way from the object to the marker; 13 numbers."""
    way = marker - point
    u = _unit(way[:, 0:2])
    hands = [10 * _turned(p - point, u) for p in (hand.grasp, hand.tip, hand.jaw_tip)]
    length = 10 * torch.sqrt((way[:, 0:2] * way[:, 0:2]).sum(-1, keepdim=True) + 1e-8)
    angles = [_minus(yaw4, _double(_double(u))), _minus(_double(hand.turn), _double(u))]
    return [*hands, _turned(velocity, u), length, *angles]


def tabletop_goal(obs: Mapping[str, Tensor]) -> Tensor:
    """For a specialist: the hand, and the goal object relative to it. ``proprio``, ``objects``, ``goal`` -> (B, 65)"""
    hand, objects, goal = _Hand(obs["proprio"]), obs["objects"], obs["goal"]
    marker = objects[:, 0:3]
    starts = (0, 3, 11, 19, 22)
    point = torch.stack([objects[:, i : i + 3] for i in starts], dim=1)  # (B, slot, 3)
    point = (point * goal[:, :, None]).sum(dim=1)
    red, blue = objects[:, 6:11], objects[:, 14:19]
    motion = red * goal[:, 1:2] + blue * goal[:, 2:3]  # zero unless a cube is the goal
    velocity, yaw4 = motion[:, 0:3], motion[:, 3:5]
    parts = _object(hand, marker, point, velocity, yaw4) + _path(hand, marker, point, velocity, yaw4)
    return torch.cat([hand.flat(), *parts], dim=-1)


def tabletop_all(obs: Mapping[str, Tensor]) -> Tensor:
    """For a generalist: the hand and every slot relative to it, no goal. ``proprio``, ``objects`` -> (B, 99+9)"""
    hand, objects = _Hand(obs["proprio"]), obs["objects"]
    marker = objects[:, 0:3]
    parts = [hand.flat(), *_relative(hand, marker), 5 * marker]
    for at in (3, 11):
        cube = objects[:, at : at + 8]
        parts += _object(hand, marker, cube[:, 0:3], cube[:, 3:6], cube[:, 6:8])
    for at in (19, 22):
        button = objects[:, at : at + 3]
        parts += [*_relative(hand, button), 5 * button]
    return torch.cat(parts, dim=-1)


FEATURES: dict[str, Features] = {"concat": concat, "tabletop_goal": tabletop_goal, "tabletop_all": tabletop_all}


def features_of(name: str) -> Features:
    """The function of that name; raises UserError listing the known ones."""
    if name not in FEATURES:
        raise unknown_choice("features", name, FEATURES)
    return FEATURES[name]


def feature_dim(spec: EnvSpec, name: str | None = None) -> int:
    """Number of flat inputs that ``name`` (default: the spec's own choice) makes of a world's observation."""
    obs = {
        group: torch.zeros((1, *array.shape))
        for group, array in spec.observation.items()
        if not group.startswith(_NOT_FLAT)
    }
    return int(features_of(name or spec.features)(obs).shape[-1])
