"""The verb ``list``: every name that an option takes."""

from __future__ import annotations

import sys

from sims.errors import unknown_choice
from sims.verbs import config_dir


def inventory() -> dict[str, list[str]]:
    """Kind -> names: worlds, and the options of every config group."""
    from sims.registry import list_envs

    found = {"env": list(list_envs())}
    for folder in sorted(p for p in config_dir().iterdir() if p.is_dir()):
        found[folder.name] = sorted(p.stem for p in folder.glob("*.yaml"))
    return found


def main(argv: list[str] | None = None) -> int:
    """``distillery list [kind]``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(args):
        print("distillery list [kind] - lists the names that options take; without a kind, all of them")
        return 0
    found = inventory()
    unknown = [a for a in args if a not in found]
    if unknown:
        print(f"error: {unknown_choice('kind', unknown[0], found, 'distillery list')}", file=sys.stderr)
        return 2
    for kind in args or found:
        print(f"{kind}:")
        print("\n".join(f"  {name}" for name in found[kind]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
