"""Fields of ``MjModel`` that worlds may differ in (``set_fields`` of :class:`sims.engines.Engine`), on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mujoco

from sims.errors import UserError, unknown_choice

# MuJoCo derives constants from these (inverse weights, mass of subtrees); they follow within set_fields
INERTIAL = ("body_mass", "body_inertia", "body_ipos", "body_iquat", "dof_armature", "qpos0")
FIELDS = (
    *INERTIAL,
    "qpos_spring",
    "geom_friction",
    "geom_solref",
    "geom_solimp",
    "pair_friction",
    "jnt_stiffness",
    "jnt_range",
    "dof_damping",
    "dof_frictionloss",
    "actuator_gainprm",
    "actuator_biasprm",
    "actuator_forcerange",
    "actuator_gear",
)


def check_fields(model: mujoco.MjModel, count: int, fields: Mapping[str, Any]) -> bool:
    """Whether constants of the model must be derived anew.

    Raises:
        UserError: a field that worlds cannot differ in, or a shape other than ``count`` times that of the model.
    """
    for name, values in fields.items():
        if name not in FIELDS:
            raise unknown_choice("model field", name, FIELDS, where="set_fields")
        wanted = (count, *getattr(model, name).shape)
        if tuple(values.shape) != wanted:
            raise UserError(f"set_fields: {name} must have the shape {wanted}, one set per world; got {values.shape}.")
    return any(name in INERTIAL for name in fields)
