"""Public task formats for kernels: read a file or a directory as a task with a reference, inputs and a tolerance."""

from kernel_tasks.reading import is_task, read_task
from kernel_tasks.task import Files, MachineError, Problem, Sizes, Task, TaskSettings

__all__ = ["Files", "MachineError", "Problem", "Sizes", "Task", "TaskSettings", "is_task", "read_task"]
