"""Stable-Baselines3 and sb3-contrib models as policy artefacts: ``distillery convert model=sac.zip env=gym/Hopper-v5``.

Such a zip holds pickles. None of them is loaded: weights are read by ``torch.load(weights_only=True)``, the rest is
taken from the readable text of its JSON. Neither library needs to be installed.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sims.errors import UserError, unknown_choice
from sims.verbs import Verb, run_verb

# where a model's policy class lives -> (algorithm, prefixes of the actor's layers, activation if none was chosen)
KINDS = {
    "stable_baselines3.sac.policies": ("SAC", ("actor.latent_pi.", "actor.mu."), "relu"),
    "stable_baselines3.td3.policies": ("TD3", ("actor.mu.",), "relu"),
    "stable_baselines3.common.policies": ("PPO", ("mlp_extractor.policy_net.", "action_net."), "tanh"),
    "sb3_contrib.tqc.policies": ("TQC", ("actor.latent_pi.", "actor.mu."), "relu"),
    "sb3_contrib.crossq.policies": ("CrossQ", ("actor.latent_pi.", "actor.mu."), "relu"),
}


@dataclass
class ConvertConfig:
    """One model to convert."""

    model: str = field(default="", metadata={"help": "zip written by model.save() of SAC, TD3, PPO, TQC or CrossQ"})
    env: str = field(default="", metadata={"help": "the world it was trained in, e.g. gym/HalfCheetah-v5"})
    env_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "options of sims.registry.make"})
    activation: str = field(
        default="", metadata={"help": "of the hidden layers, where the zip does not say it: relu, tanh, elu, ..."}
    )
    normalizer: str = field(
        default="", metadata={"help": "npz written by control.sb3.dump_normalizer, if VecNormalize was used"}
    )
    out: str = field(default="runs/converted", metadata={"help": "run folder; the artefact is its folder policy"})


def convert(cfg: ConvertConfig) -> Path:
    """Write the artefact and return its folder.

    Raises:
        UserError: no such file, another kind of model, shapes that do not fit the world, gSDE, dictionary observations.
    """
    import torch

    from control.convert_actor import Converted, build_actor
    from control.export import export_policy
    from sims.features import features_of
    from sims.registry import make

    for name in ("model", "env"):
        if not getattr(cfg, name):
            raise UserError(f"option {name} is missing. See: distillery convert --help")
    kind, weights, data, version = _read_zip(Path(cfg.model))
    env = make(cfg.env, 16, seed=0, **cfg.env_options)
    actor = build_actor(kind, weights, data, cfg.activation, _normalizer(cfg.normalizer), env.spec, cfg.model)
    obs = env.reset(0)
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.tensor(b) for b in (env.spec.action.low, env.spec.action.high))
    for _ in range(5):  # observations of a world in motion make better golden vectors than starts
        obs = env.step(low + (high - low) * torch.rand(16, len(low), generator=generator)).obs
    features = features_of(env.spec.features)
    module = Converted(features, actor)
    source = {"algorithm": kind, "stable_baselines3": version, "file": Path(cfg.model).name}
    example = {k: v for k, v in obs.items() if not k.startswith(("pixels/", "privileged"))}
    path = export_policy(module, env.spec, example, Path(cfg.out) / "policy", extra={"converted": source})
    env.close()
    print(f"{kind} of Stable-Baselines3 {version} -> {path}")
    return path


def _read_zip(file: Path) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    """(algorithm, weights, readable JSON, version)."""
    import torch

    if not file.is_file():
        raise UserError(f"no model at {file}. Give the zip that model.save() wrote.")
    try:
        with zipfile.ZipFile(file) as archive:
            data = json.loads(archive.read("data"))
            weights = torch.load(io.BytesIO(archive.read("policy.pth")), map_location="cpu", weights_only=True)
            version = archive.read("_stable_baselines3_version").decode().strip()
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UserError(
            f"{file} is not a model of Stable-Baselines3: {error}. Give the zip of model.save()."
        ) from error
    except Exception as error:  # weights that only a pickle could restore
        raise UserError(
            f"{file}: its weights are not plain tensors and were not loaded ({str(error)[:120]})."
        ) from error
    module = data.get("policy_class", {}).get("__module__", "")
    if module not in KINDS:
        raise unknown_choice("policy class of", module or "nothing", KINDS, str(file))
    if data.get("use_sde"):
        raise UserError(f"{file} was trained with gSDE (use_sde=True), which is not supported. Train without it.")
    return KINDS[module][0], weights, data, version


def _normalizer(file: str) -> dict[str, Any] | None:
    import numpy as np

    if not file:
        return None
    if file.endswith(".pkl"):
        raise UserError(f"{file} is a pickle, which is never loaded. In the process that trained, call "
                        "control.sb3.dump_normalizer(env, 'statistics.npz') and give that file.")  # fmt: skip
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in ("mean", "var", "epsilon", "clip")}
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{file} holds no statistics of control.sb3.dump_normalizer: {error}") from error


VERB = Verb(
    name="convert",
    schema=ConvertConfig,
    run=convert,
    sentence="turn a model of Stable-Baselines3 or sb3-contrib into a policy artefact, without unpickling anything",
    examples=(
        "distillery convert model=sac.zip env=gym/HalfCheetah-v5 out=runs/sac",
        "distillery convert model=ppo.zip env=tabletop/reach normalizer=statistics.npz out=runs/ppo",
    ),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
