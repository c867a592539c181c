"""The verb ``fit``: ``python -m vlm_rewards.fit out=runs/fit``. The work is in ``vlm_rewards.fitting``."""

from __future__ import annotations

import sys

from sims.verbs import Verb, run_verb
from vlm_rewards.config import FitConfig

VERB = Verb(
    name="fit",
    schema=FitConfig,
    run="vlm_rewards.fitting:fit",
    sentence="train the small CLIP on rendered frames with captions from state predicates, and grade it",
    examples=(
        "distillery fit out=runs/fit",
        "distillery fit out=runs/fit_small frames=3000 steps=150",
        "distillery train reward=clip reward.model=local-dir:runs/fit/model",
    ),
)


def main(argv: list[str] | None = None) -> int:
    return run_verb(VERB, argv)


if __name__ == "__main__":
    sys.exit(main())
