"""The checks of run.sh. Each returns figures or raises; all run even when one fails."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from host_reads import no_host_reads

from control.checkpoint import load_checkpoint
from control.config import DSACTConfig, PPOConfig, SACConfig, TrainConfig, resolve
from control.dsact import DSACT
from control.off_policy import OffPolicyLoop
from control.on_policy import OnPolicyLoop
from control.sac import SAC
from control.types import Transition
from sims.features import concat
from sims.types import ArraySpec, EnvSpec, TimeStep

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
CUDA = DEVICE == "cuda"
TOLERANCE = 1e-4 if CUDA else 1e-5  # of weights after ten updates: CUDA sums in another order
LEARNERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sac": (SAC, SACConfig), "dsact": (DSACT, DSACTConfig),
}  # fmt: skip
WIDTH, F, A = 256 if CUDA else 64, 48, 12


class Drift:
    """B points on ``DEVICE`` that actions push: a simulator that never leaves it."""

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        self.num_envs, self.device = num_envs, torch.device(DEVICE)
        box = ArraySpec((A,), low=(-1.0,) * A, high=(1.0,) * A)
        self.spec = EnvSpec("toy/drift", {"proprio": ArraySpec((F,))}, box, control_hz=20.0, episode_steps=50)
        self.reset(seed)

    def reset(self, seed: int) -> Mapping[str, Tensor]:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.where, self.age = self._start(), torch.zeros(self.num_envs, device=DEVICE)
        return {"proprio": self.where.clone()}

    def _start(self) -> Tensor:
        return torch.rand(self.num_envs, F, generator=self.generator, device=DEVICE) * 2 - 1

    def step(self, action: Tensor) -> TimeStep:
        self.where = torch.cat([self.where[:, :A] + 0.1 * action, self.where[:, A:]], -1)
        self.age = self.age + 1
        reward = -self.where[:, :A].square().mean(-1)
        terminated, truncated = reward < -4, self.age >= self.spec.episode_steps
        done, successor = terminated | truncated, {"proprio": self.where}
        self.where = torch.where(done.unsqueeze(-1), self._start(), self.where)
        self.age = torch.where(done, 0.0, self.age)
        metrics = {"success": (reward > -0.1).float(), "reward/near": reward}
        return TimeStep({"proprio": self.where}, successor, reward, terminated, truncated & ~terminated, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"where": self.where.clone(), "age": self.age.clone(), "rng": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Mapping[str, Tensor]:
        self.where, self.age = state["where"].to(DEVICE), state["age"].to(DEVICE)
        self.generator.set_state(state["rng"].cpu())
        return {"proprio": self.where.clone()}

    def render(self, ids: Sequence[int], camera: str) -> Tensor:
        raise NotImplementedError

    def close(self) -> None:
        pass


def batch(n: int) -> Transition:
    g = torch.Generator().manual_seed(n)
    obs, action = torch.randn(n, F, generator=g), torch.rand(n, A, generator=g) * 2 - 1
    rows = (obs, action, torch.randn(n, generator=g), torch.full((n,), 0.97), obs + 0.1)
    return Transition(*(x.to(DEVICE) for x in rows))


def loop_of(name: str, folder: str, envs: int = 64, **algo: Any) -> Any:
    """A training on :class:`Drift`."""
    schema = {"sac": SACConfig, "dsact": DSACTConfig, "ppo": PPOConfig}[name]
    own = {"rollout_steps": 16, "minibatch_size": 256} if name == "ppo" else {"batch_size": 256, "warmup_steps": 512}
    cfg = TrainConfig(env="toy/drift", num_envs=envs, algo=schema(**{"width": 64, "gamma": 0.9, **own, **algo}),
                      steps=1_000_000, utd=None if name == "ppo" else 0.0625, eval_every=0, device=DEVICE)  # fmt: skip
    kind: Any = OnPolicyLoop if name == "ppo" else OffPolicyLoop
    loop = kind(resolve(cfg), Drift(envs), Drift(8, 77), concat, Path(folder))
    as_on_cuda(loop.learner)
    return loop


def as_on_cuda(learner: Any) -> Any:
    """The CPU's fused pass gathers rows, which CUDA's does not: let the twin take CUDA's way."""
    nets = getattr(getattr(learner, "_gradients", None), "nets", None)
    if nets is not None:
        nets.choose = False
    return learner


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def per_second(run: Callable[[], object], repeats: int) -> float:
    for _ in range(4):  # a graph is recorded once for updates with the actor, and once for those without
        run()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return round(repeats / (time.perf_counter() - start), 1)


def worst(one: Any, other: Any, names: Sequence[str]) -> float:
    return max(float((getattr(one, k) - getattr(other, k)).detach().abs().max()) for k in names)


def near(difference: float, limit: float) -> dict[str, Any]:
    assert difference <= limit, f"weights differ by {difference}, more than {limit}"
    return {"worst_difference": difference}


def equals_autograd(name: str) -> dict[str, Any]:
    """Graphs draw their noise as eager calls do, so the two stay together."""
    make, config = LEARNERS[name]
    cfg = config(width=64, lr=1e-3, gamma=0.9)
    ours, oracle = as_on_cuda(make(F, A, cfg, DEVICE)), make(F, A, dataclasses.replace(cfg, update="autograd"), DEVICE)
    for i in range(10):
        for learner in (ours, oracle):
            learner.update(batch(256 + i % 2))  # two shapes: two graphs that share one state
    return near(worst(ours, oracle, ("theta_actor", "theta_critic", "theta_target", "log_alpha")), TOLERANCE)


def ppo_equals_autograd() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        loops = [loop_of("ppo", folder, lr=1e-3, epochs=2, update=update) for update in ("fused", "autograd")]
        for loop in loops:
            loop.advance()
        return near(worst(loops[0].learner, loops[1].learner, ("theta",)), TOLERANCE)


def bfloat16_is_near(name: str) -> dict[str, Any]:
    make, config = LEARNERS[name]
    values = []
    for precision in ("float32", "bfloat16"):
        learner = make(F, A, config(width=64, lr=1e-3, gamma=0.9, precision=precision), DEVICE)
        for _ in range(20):
            metrics = learner.update(batch(256))
        assert bool(learner.theta_critic.isfinite().all())
        values.append(float(metrics["critic_loss"]))
    assert abs(values[1] - values[0]) < 0.1 * abs(values[0]), f"critic_loss {values}"
    return {"critic_loss": values}


def loaded_state_reaches_the_graph(name: str) -> dict[str, Any]:
    """A captured update reads its state in place."""
    make, config = LEARNERS[name]
    cfg, data = config(width=32, gamma=0.9), batch(64)
    first, second = make(F, A, cfg, DEVICE), make(F, A, cfg, DEVICE, seed=5)
    for learner in (first, second):
        for _ in range(4):
            learner.update(data)
    second.load_state_dict(first.state_dict())
    for learner in (first, second):
        for _ in range(4):
            learner.update(data)
    assert torch.equal(first.theta_critic, second.theta_critic)
    return {}


def resumes(name: str) -> dict[str, Any]:
    """A checkpoint of a run on the device goes on as the run does."""
    with tempfile.TemporaryDirectory() as folder:
        run, again = loop_of(name, folder), loop_of(name, folder)
        for _ in range(4):
            run.advance()
        run.save()
        again.restore(load_checkpoint(run.checkpoint_path))
        for loop in (run, again):
            for _ in range(2):
                loop.advance()
        names = ("theta",) if name == "ppo" else ("theta_actor", "theta_critic")
        return {"updates": run.learner.updates, **near(worst(run.learner, again.learner, names), TOLERANCE * CUDA)}


def reads_nothing_back(name: str) -> dict[str, Any]:
    """No step of the loop makes the host wait: acting, the world, storing, drawing, updating. PPO: collecting."""
    with tempfile.TemporaryDirectory() as folder:
        loop = loop_of(name, folder)
        for _ in range(6):
            loop.advance()
        updates = loop.learner.updates
        with no_host_reads(DEVICE):
            for _ in range(4):
                if name == "ppo":
                    loop.collect()
                else:
                    loop.advance()
        return {"updates": loop.learner.updates - updates}


def exports(name: str) -> dict[str, Any]:
    """What is exported, on the CPU, acts as the learner does on the device."""
    with tempfile.TemporaryDirectory() as folder:
        loop = loop_of(name, folder)
        for _ in range(3):
            loop.advance()
        obs = batch(256).obs
        here = loop.learner.export()(obs.cpu())
        return near(float((loop.learner.act(obs, explore=False).cpu() - here).detach().abs().max()), 1e-4)


def updates_per_second(name: str) -> dict[str, Any]:
    make, config = LEARNERS[name]
    sizes, repeats = ((256, 2048, 8192, 32768), 200) if CUDA else ((256, 512), 5)
    figures = {}
    for update, precision in (("fused", "float32"), ("autograd", "float32"), ("fused", "bfloat16")):
        for n in sizes:
            learner, data = make(F, A, config(width=WIDTH, update=update, precision=precision), DEVICE), batch(n)
            figures[f"{update}/{precision}/{n}"] = per_second(lambda s=learner, d=data: s.update(d), repeats)
    return figures


def ppo_updates_per_second() -> dict[str, Any]:
    """Whole updates: five passes over 24 steps of every environment, in four minibatches."""
    envs = 4096 if CUDA else 64
    figures: dict[str, Any] = {"num_envs": envs}
    with tempfile.TemporaryDirectory() as folder:
        for update in ("fused", "autograd"):
            size = envs * 24 // 4
            loop = loop_of(
                "ppo", folder, envs, width=WIDTH, rollout_steps=24, epochs=5, minibatch_size=size, update=update
            )
            rollout = loop.rollout(*loop.collect())
            figures[update] = per_second(lambda s=loop.learner, r=rollout: s.update(r), 20 if CUDA else 2)
    return figures


def steps_per_second(name: str) -> dict[str, Any]:
    """The whole loop with four updates a vector step, or the updates of a rollout."""
    envs, turns = (4096, 40) if CUDA else (64, 2)
    own = {"minibatch_size": envs * 4} if name == "ppo" else {"batch_size": 8192 if CUDA else 256}
    with tempfile.TemporaryDirectory() as folder:
        loop = loop_of(name, folder, envs, width=WIDTH, **own)
        if name != "ppo":
            loop.cfg.utd = 4 / envs
        for _ in range(4):
            loop.advance()
        wait()
        step, updates, start = loop.step, loop.learner.updates, time.perf_counter()
        for _ in range(turns):
            loop.advance()
        wait()
        seconds = time.perf_counter() - start
        rates = {
            "steps_per_s": (loop.step - step) / seconds,
            "updates_per_s": (loop.learner.updates - updates) / seconds,
        }
        return {"num_envs": envs, **{k: round(v, 1) for k, v in rates.items()}}


def brax_steps() -> dict[str, Any]:
    import jax

    from sims.registry import make

    n = 2048 if CUDA else 16
    env = make("brax/inverted_pendulum", n)
    obs = env.reset(0)
    action = torch.zeros(n, env.spec.action.shape[0], device=env.device)
    env.step(action)
    with no_host_reads(DEVICE):
        env.step(action)
    start = time.perf_counter()
    for _ in range(50):
        step = env.step(action)
    assert bool(torch.isfinite(step.obs["proprio"]).all())
    assert obs["proprio"].device == env.device
    rate = round(50 * n / (time.perf_counter() - start))
    return {"num_envs": n, "steps_per_s": rate, "jax": jax.default_backend(), "torch": str(env.device)}


def warp() -> dict[str, Any]:
    """No engine of ours uses it; whether it is there is worth knowing."""
    return {"mujoco_warp": importlib.util.find_spec("mujoco_warp") is not None}


LOOPS = ("sac", "dsact", "ppo")
CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"fused equals autograd, {n}": lambda n=n: equals_autograd(n) for n in LEARNERS},
    "fused equals autograd, ppo": ppo_equals_autograd,
    **{f"bfloat16 is near float32, {n}": lambda n=n: bfloat16_is_near(n) for n in LEARNERS},
    **{f"a loaded state reaches the graph, {n}": lambda n=n: loaded_state_reaches_the_graph(n) for n in LEARNERS},
    **{f"resumes, {n}": lambda n=n: resumes(n) for n in LOOPS},
    **{f"reads nothing back, {n}": lambda n=n: reads_nothing_back(n) for n in LOOPS},
    **{f"exports, {n}": lambda n=n: exports(n) for n in LOOPS},
    **{f"updates per second, {n}": lambda n=n: updates_per_second(n) for n in LEARNERS},
    "updates per second, ppo": ppo_updates_per_second,
    **{f"steps per second, {n}": lambda n=n: steps_per_second(n) for n in LOOPS},
    "brax": brax_steps,
    "warp": warp,
}


def run_check(name: str) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        row = {"check": name, "ok": True, **CHECKS[name]()}
    except Exception as error:
        traceback.print_exc()
        row = {"check": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
    return row | {"seconds": round(time.perf_counter() - start, 2)}


def main(folder: str, skip: Sequence[str] = ()) -> int:
    """Run all checks but those named in ``skip``; 1 when one failed."""
    name = torch.cuda.get_device_name(0) if CUDA else "no CUDA device: CPU twin only"
    rows = []
    for check in CHECKS:
        if check not in skip:
            rows.append(run_check(check))
            print(json.dumps(rows[-1]), flush=True)
    failed = [row["check"] for row in rows if not row["ok"]]
    summary = {"device": name, "torch": torch.__version__, "checks": len(rows), "failed": failed}
    print(json.dumps(summary), flush=True)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "gpu.json").write_text(json.dumps({**summary, "rows": rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]))
