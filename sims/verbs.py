"""The only door between hydra and the code: every verb composes its config, checks it and runs through here. A leaf."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import re
import signal
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sims.errors import UserError, unknown_choice


@dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
        name: the verb; its root config is ``configs/<name>.yaml``.
        schema: the dataclass of the whole config.
        run: the function that takes the config, or ``"module:function"`` to import it only when it is needed.
            An ``int`` it returns becomes the exit status.
        sentence: what the verb does.
        examples: command lines to copy.
        groups: config group -> option -> dataclass of that option.
        presets: groups whose options set several options of the whole config at once; none is chosen by default.
    """

    name: str
    schema: type
    run: Callable[[Any], object] | str
    sentence: str
    examples: tuple[str, ...] = ()
    groups: Mapping[str, Mapping[str, type]] = field(default_factory=dict)
    presets: tuple[str, ...] = ()


def config_dir() -> Path:
    """The folder of YAML: ``configs/`` of a checkout, or the copy that the wheel carries."""
    root = Path(__file__).resolve().parent.parent
    for place in (root / "configs", root / "distill" / "_configs"):
        if (place / "train.yaml").exists():
            return place
    raise UserError(f"no configs: neither configs/ nor distill/_configs/ in {root}. Reinstall robot-distillery.")


def compose(verb: Verb, overrides: list[str]) -> Any:
    """Compose ``configs/<verb>.yaml`` with hydra and return the checked dataclass.

    Raises:
        UserError: unknown group, option or key (with or without ``+``), wrong type, value out of range.
    """
    return to_config(compose_raw(verb, overrides), verb)


def compose_raw(verb: Verb, overrides: list[str]) -> Any:
    """The composed DictConfig, before :func:`to_config`."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    _register(verb)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            return hydra.compose(config_name=verb.name, overrides=_free(verb, overrides))
    except Exception as error:
        if not type(error).__module__.startswith(("hydra", "omegaconf", "antlr4")):
            raise
        raise _explain(error, verb, overrides) from error


def _free(verb: Verb, overrides: list[str]) -> list[str]:
    """``env_options.time_limit=5`` needs no ``+``: below a field that is a mapping, any key is welcome."""
    hints = typing.get_type_hints(verb.schema)
    below = tuple(f"{name}." for name, kind in hints.items() if typing.get_origin(kind) is dict)
    return [f"++{o}" if o.startswith(below) else o for o in overrides]


def _register(verb: Verb) -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name=f"base_{verb.name}", node=verb.schema)
    for group, options in verb.groups.items():
        for option, schema in options.items():
            store.store(group=group, name=f"base_{option}", node=schema)


def run_sweep(verb: Verb, argv: list[str], objective: Callable[[Any, Path], float], out: Path) -> None:
    """Run ``verb`` many times with hydra's Optuna sweeper.

    Args:
        argv: options, ranges such as ``algo.lr=interval(1e-4,1e-2)``, and the sweeper's ``hydra.sweeper.n_trials=20``.
        objective: (checked config, folder of the trial) -> number to be maximised.
        out: folder of the sweep; trials are numbered in it, the best one is in ``optimization_results.yaml``.

    Raises:
        UserError: the sweeper is not installed, or hydra does not understand an option.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    logging.getLogger("alembic").setLevel(logging.WARNING)  # of Optuna; it would tell of its plugins
    try:
        for name in ("optuna", "hydra_plugins.hydra_optuna_sweeper"):
            importlib.import_module(name)
    except ImportError as error:
        raise UserError("a sweep needs Optuna's sweeper for hydra: pip install 'robot-distillery[sweep]' "
                        f"({error}).") from error  # fmt: skip
    _register(verb)

    def trial(raw: Any) -> float:
        return objective(to_config(raw, verb), Path(HydraConfig.get().runtime.output_dir))

    run = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=verb.name)(trial)
    fixed = ["--multirun", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", f"hydra.sweep.dir={out}",
             "hydra.job_logging.root.level=WARNING"]  # fmt: skip
    before, sys.argv = sys.argv, [verb.name, *fixed, *_free(verb, argv)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra would turn an error into an exit of the process
    try:
        run()
    finally:
        sys.argv = before


def to_config(raw: Any, verb: Verb | None = None) -> Any:
    """DictConfig -> dataclasses; rejects missing values and unknown fields, which ``+key`` would let through."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(raw)
    except OmegaConfBaseException as error:
        raise UserError(_first_lines(str(error))) from error
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    for path, node in _dataclasses(config):
        known = {f.name for f in dataclasses.fields(node)}
        for name in sorted(vars(node).keys() - known):
            raise unknown_choice("option", f"{path}{name}", [path + k for k in known], _where(verb))
    return config


def save_config(config: Any, path: Path) -> None:
    """Write a config as YAML, atomically."""
    from omegaconf import OmegaConf

    temporary = path.with_suffix(".tmp")
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    temporary.replace(path)


def run_verb(verb: Verb, argv: list[str] | None = None) -> int:
    """Run one command line; prints a user's mistake as one message and returns 2, 130 when interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    # SIGTERM and SIGHUP take the same way out as Ctrl-C, so that every ``finally`` runs
    for name in ("SIGTERM", "SIGHUP"):
        try:
            signal.signal(getattr(signal, name), _interrupt)
        except (AttributeError, ValueError):  # not on this platform, or not the main thread
            continue
    try:
        if {"-h", "--help"} & set(args):
            print(help_text(verb), flush=True)
            return 0
        if "--cfg" in args:
            from omegaconf import OmegaConf

            rest = [a for a in args if a not in ("--cfg", "job", "--resolve")]
            to_config(raw := compose_raw(verb, rest), verb)
            print(OmegaConf.to_yaml(raw, resolve="--resolve" in args), end="")
            return 0
        for arg in args:
            if "=" not in arg and not arg.startswith("~"):
                raise UserError(f"'{arg}' on the command line of '{verb.name}' is not of the form option=value. "
                                f"See: distillery {verb.name} --help")  # fmt: skip
        result = _resolve(verb.run)(compose(verb, args))
        return result if isinstance(result, int) and not isinstance(result, bool) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as head, had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted; the same command resumes", file=sys.stderr)
        return 130


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _resolve(run: Callable[[Any], object] | str) -> Callable[[Any], object]:
    if callable(run):
        return run
    module, name = run.split(":")
    return getattr(importlib.import_module(module), name)


def _where(verb: Verb | None) -> str:
    return f"the options of '{verb.name}'" if verb else ""


def _dataclasses(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every dataclass instance below ``node`` with its dotted prefix."""
    if dataclasses.is_dataclass(node):
        yield path, node
        for name, value in vars(node).items():
            yield from _dataclasses(value, f"{path}{name}.")
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _dataclasses(value, f"{path}{name}.")


def _first_lines(text: str) -> str:
    """Omegaconf's message without its internal details, on one line."""
    lines = [line.strip() for line in text.splitlines()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    return f"option '{key}': {lines[0]}" if key else lines[0]


def _explain(error: Exception, verb: Verb, overrides: list[str]) -> UserError:
    text = str(error)
    missing = re.search(r"(?:Could not find|In '[^']*': Could not find) '([^'/]+)/([^']+)'", text)
    if missing:
        group, option = missing.groups()
        folder = config_dir() / group
        known = [p.stem for p in folder.glob("*.yaml")] if folder.is_dir() else []
        return unknown_choice(group, option, known, f"{group}={option}")
    bad = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct|Key '([^']+)' not in", text)
    if bad:
        key = next(part for part in bad.groups() if part)
        full = next(
            (o.lstrip("+~").split("=")[0] for o in overrides if o.lstrip("+~").split("=")[0].endswith(key)), key
        )
        return unknown_choice("option", full, _option_names(verb, overrides), _where(verb))
    for override in overrides:
        key = override.lstrip("+~").split("=")[0]
        if key in verb.groups and f"'{key}" in text:
            return UserError(f"{override}: {_first_lines(text)}")
    cause = error.__cause__
    return UserError(_first_lines(text) + (f" ({_first_lines(str(cause))})" if cause else ""))


def _option_names(verb: Verb, overrides: list[str]) -> list[str]:
    """Dotted names of every option, including those of the chosen group options."""
    names = [*verb.groups, *verb.presets]
    for path, _, _, _ in _fields(verb.schema):
        names.append(path)
    chosen = dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
    for group, options in verb.groups.items():
        schemas = [options[chosen[group]]] if chosen.get(group) in options else list(options.values())
        names += [f"{group}.{path}" for schema in schemas for path, *_ in _fields(schema)]
    return sorted(set(names))


def _fields(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(dotted name, type, default, meaning) of every leaf field of a dataclass type."""
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        kind = hints[item.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            inner = list(_fields(kind, f"{prefix}{item.name}."))
            if inner:
                yield from inner
                continue
        yield f"{prefix}{item.name}", _type_name(kind), _default(item), item.metadata.get("help", "")


def _type_name(kind: Any) -> str:
    if isinstance(kind, (types.UnionType, types.GenericAlias)) or typing.get_origin(kind):
        return str(kind).replace("typing.", "").replace(" | None", "?")
    return getattr(kind, "__name__", str(kind))


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return str(item.default) if item.default != "" else "''"
    if item.default_factory is not dataclasses.MISSING:
        return str(item.default_factory())
    return "required"


def help_text(verb: Verb) -> str:
    """What ``--help`` prints: a sentence, examples, groups, and every field with its type, default and meaning."""
    lines = textwrap.wrap(f"distillery {verb.name} - {verb.sentence}", 100)
    lines += ["", "usage: distillery " + verb.name + " [option=value ...] [--cfg job] [--help]", "", "examples:"]
    for example in verb.examples:
        lines += _continued(example)
    if verb.groups:
        lines += ["", "groups (choose one option each; group.field=value sets a field of it):"]
        for group in (*verb.groups, *verb.presets):
            known = sorted(p.stem for p in (config_dir() / group).glob("*.yaml"))
            lines += textwrap.wrap(f"{group}={' | '.join(known)}", 96, initial_indent="  ", subsequent_indent="    ")
    lines += ["", "options:"]
    lines += _table(f for f in _fields(verb.schema) if f[0].split(".")[0] not in verb.groups)
    for group, options in verb.groups.items():
        for schema in dict.fromkeys(options.values()):
            names = " | ".join(option for option, other in options.items() if other is schema)
            lines += ["", f"options of {group}={names}:", *_table(_fields(schema, f"{group}."))]
    return "\n".join(lines)


def _continued(command: str) -> list[str]:
    """A command line as a shell takes it, broken with backslashes where it is too long for the page."""
    parts = [""]
    for word in re.findall(r'(?:[^\s"]|"[^"]*")+', command):  # a quoted sentence stays whole
        if parts[-1] and len(parts[-1]) + len(word) > 90:
            parts.append("")
        parts[-1] = f"{parts[-1]} {word}".strip()
    indented = [("  " if i == 0 else "      ") + part for i, part in enumerate(parts)]
    return [line + " \\" for line in indented[:-1]] + indented[-1:]


def _table(rows: Iterator[tuple[str, str, str, str]] | list[tuple[str, str, str, str]]) -> list[str]:
    lines: list[str] = []
    for name, kind, default, meaning in rows:
        head = f"  {name} ({kind}, {default})" if len(default) < 40 else f"  {name} ({kind})"
        if len(head) < 44:
            lines += textwrap.wrap(f"{head:<44}{meaning}", 100, subsequent_indent=" " * 44, drop_whitespace=True) or [
                head
            ]
        else:
            lines += [head[:100], *textwrap.wrap(meaning, 100, initial_indent=" " * 44, subsequent_indent=" " * 44)]
    return lines
