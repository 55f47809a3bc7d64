"""Names of tasks and groups on the command line → the suite's tasks."""

from collections.abc import Sequence
from difflib import get_close_matches

from .suite import GROUPS, PREFIX, TASKS


def tasks_named(names: Sequence[str]) -> list[str]:
    """Resolve tasks and groups, with or without `looped_`; each task once, in the suite's order.

    Raises ValueError for an unknown name, with the nearest ones, and for none.
    """
    found: set[str] = set()
    for name in (part for one in names for part in one.split(",") if part):
        bare = name.removeprefix(PREFIX)
        if PREFIX + bare in GROUPS:
            found.update(GROUPS[PREFIX + bare])
        elif bare in TASKS:
            found.add(bare)
        else:
            known = [*GROUPS, *(PREFIX + task for task in TASKS)]
            near = get_close_matches(PREFIX + bare, known, n=3, cutoff=0.3) or known
            raise ValueError(f"There is no task {name!r}. Near: {', '.join(near)}.")
    if not found:
        raise ValueError(f"No task is named. Give some of {', '.join(GROUPS)}, or single tasks.")
    return [task for task in TASKS if task in found]
