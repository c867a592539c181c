"""The tasks of the tabletop: rewards, success and a scripted demonstrator each."""

from sims.tasks.base import Scene, Task, scene_of
from sims.tasks.lift import LIFT
from sims.tasks.move import MOVE
from sims.tasks.press import PRESS
from sims.tasks.reach import REACH

TASKS = {task.name: task for task in (REACH, PRESS, MOVE, LIFT)}

__all__ = ["TASKS", "Scene", "Task", "scene_of"]
