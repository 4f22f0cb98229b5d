"""Public task formats for kernels: read a file or a directory as a task with a reference, inputs and a tolerance."""

from kernel_tasks.kernelbench import Sizes, Task, TaskSettings, read_task

__all__ = ["Sizes", "Task", "TaskSettings", "read_task"]
