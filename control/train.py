"""Train one specialist: ``python -m control.train env=tabletop/reach algo=dsact out=runs/reach``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from control.config import ALGOS, PPOConfig, ResolvedConfig, TrainConfig, resolve
from sims.errors import UserError
from sims.types import EnvSpec
from sims.verbs import Verb, run_verb, save_config
from vlm_rewards.config import REWARDS, EnvReward

FREE_TO_CHANGE = ("out", "threads", "device", "checkpoint_seconds", "log_every", "tensorboard", "progress")  # on resume
FINAL_SEED = 2_000_003  # start states of the last evaluation
MOST_EVAL_ENVS = 256  # thousands of copies would each run a whole episode for the sake of some hundred


def train(cfg: TrainConfig) -> Path:
    """Train, evaluate and export one specialist; a finished run is reused, an unfinished one resumes.

    Returns:
        ``cfg.out`` with ``config.yaml``, ``metrics.jsonl``, ``checkpoint/``, ``replay/``, ``policy/``, ``result.json``.

    Raises:
        UserError: unknown environment or learner, a folder that holds another run, a damaged checkpoint, a full disk.
        KeyboardInterrupt: after a checkpoint was written, when a signal asked to end.
    """
    cfg = resolve(cfg)
    out = Path(cfg.out)
    _check_same_run(cfg, out)
    if (out / "result.json").exists():
        if cfg.progress:
            print(f"{out} holds this run, finished; another out= trains it again")
        return out
    import torch

    from control.checkpoint import FULL_DISK, explained_writes

    torch.set_num_threads(cfg.threads)
    torch.set_flush_denormal(True)  # denormal moments of Adam are slow on x86
    with explained_writes(out / "checkpoint", FULL_DISK):
        _run(cfg, out)
    return out


def _run(cfg: ResolvedConfig, out: Path) -> None:
    loop = _build_loop(cfg, out)
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "config.yaml").exists():
        save_config(cfg, out / "config.yaml")
    try:
        loop.run()
        _finish(cfg, loop, out)
    finally:
        loop.watch.close()
        loop.env.close()
        loop.eval_env.close()


def _build_loop(cfg: ResolvedConfig, out: Path) -> Any:
    from control.checkpoint import has_checkpoint
    from control.off_policy import OffPolicyLoop
    from control.on_policy import OnPolicyLoop
    from sims.features import FEATURES
    from sims.registry import has_option, make

    options = dict(cfg.env_options)
    if getattr(cfg.algo, "privileged", False) and has_option(cfg.env, "privileged"):
        options |= {"privileged": True}
    score = None
    eval_env = make(cfg.env, min(cfg.num_envs, MOST_EVAL_ENVS), seed=cfg.seed + 1, **options)
    if not isinstance(cfg.reward, EnvReward):
        score, pixels = _reward_model(cfg, eval_env)
        options |= pixels
    env = make(cfg.env, cfg.num_envs, seed=cfg.seed, **options)
    if isinstance(cfg.algo, PPOConfig):
        return OnPolicyLoop(cfg, env, eval_env, FEATURES[env.spec.features], out, score)
    prior = [] if has_checkpoint(out / "checkpoint") else _demonstrations(cfg, eval_env)
    return OffPolicyLoop(cfg, env, eval_env, FEATURES[env.spec.features], out, score, prior)


def _reward_model(cfg: ResolvedConfig, env: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The reward model's score, and the environment options that render what it reads."""
    from vlm_rewards import build_reward

    sentence = cfg.reward.instruction or (env.spec.instructions[0] if env.spec.instructions else "")
    if not sentence:
        raise UserError(f"reward={cfg.reward.kind} needs a sentence and {cfg.env} has none: set reward.instruction.")
    model = build_reward(cfg.reward, sentence)
    assert model is not None, "only the task's own reward builds to None"
    # frames that the model will not look at need not be drawn
    every = {"draw_every": cfg.reward.stride} if cfg.reward.stride > 1 else {}
    return model.score, {"pixels": tuple(model.cameras), "image_size": model.image_size, **every}


def _demonstrations(cfg: ResolvedConfig, env: Any) -> list[Any]:
    if not cfg.demos:
        return []
    from control.demonstrations import collect_demonstrations

    demonstrator = env.demonstrator() if hasattr(env, "demonstrator") else None
    if demonstrator is None:
        raise UserError(f"demos={cfg.demos}: {cfg.env} has no scripted demonstrator. Set demos=0.")
    return collect_demonstrations(env, demonstrator.act, cfg.demos, cfg.seed + 5_000)


def _finish(cfg: ResolvedConfig, loop: Any, out: Path) -> None:
    """Last evaluation on fresh starts, the artefact, and at the very end ``result.json``."""
    from control.evaluate import evaluate
    from control.export import ActorModule, export_policy
    from control.log import write_text

    result = evaluate(loop.eval_env, loop.act_greedily, cfg.final_episodes, FINAL_SEED + cfg.seed)
    spec = _of_a_policy(loop.eval_env.spec)
    figures = {
        **result.to_json(spec.control_hz), "env": cfg.env, "algo": cfg.algo.name, "seed": cfg.seed, "steps": loop.step,
        "updates": loop.learner.updates, "demos": cfg.demos, "wall_s": round(loop.watch.wall, 2),
        "has_success": spec.has_success, "excluded": loop.excluded, "solved": loop.watch.solved_in_a_row >= 2,
    }  # fmt: skip
    module = ActorModule(loop.features, loop.learner, spec)
    obs = loop.eval_env.reset(EXAMPLE_SEED)
    example = {k: v for k, v in obs.items() if not k.startswith(_NOT_EXPORTED)}
    export_policy(module, spec, example, out / "policy", extra={"training": figures})
    write_text(out / "result.json", json.dumps(figures, indent=1))
    if loop.watch.progress:
        loop.watch.progress.finish(result.row(), out)


def _of_a_policy(spec: EnvSpec) -> EnvSpec:
    """Without what only critics see."""
    groups = {name: array for name, array in spec.observation.items() if not name.startswith("privileged")}
    return dataclasses.replace(spec, observation=groups)


EXAMPLE_SEED = 3_000_003  # observations of the golden vectors
_NOT_EXPORTED = ("pixels/", "privileged")


def _check_same_run(cfg: ResolvedConfig, out: Path) -> None:
    """Refuse to reuse or resume a folder that holds a run with other settings."""
    file = out / "config.yaml"
    if not file.exists():
        return
    import yaml

    try:
        found = _flat(yaml.safe_load(file.read_text()))
    except (yaml.YAMLError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}). Delete {out} or choose another out=.") from error
    want = _flat(json.loads(json.dumps(dataclasses.asdict(cfg))))
    for name in sorted(found.keys() | want.keys()):
        if name not in FREE_TO_CHANGE and found.get(name) != want.get(name):
            raise UserError(
                f"{out} holds a run with {name}={found.get(name)}, this command says {name}={want.get(name)}. "
                "Choose another out=, or repeat the settings of that run."
            )


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


VERB = Verb(
    name="train",
    schema=TrainConfig,
    run=train,
    sentence="learn one skill in simulation by reinforcement, and write it as a policy artefact",
    examples=(
        "distillery train env=tabletop/reach out=runs/reach",
        "distillery train env=tabletop/lift algo=sac seed=1 out=runs/lift",
        "distillery train env=gym/HalfCheetah-v5 algo=ppo steps=200000 out=runs/cheetah",
        "distillery train experiment=parallel_dsact out=runs/parallel",
    ),
    groups={"algo": ALGOS, "reward": REWARDS},
    presets=("experiment",),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
