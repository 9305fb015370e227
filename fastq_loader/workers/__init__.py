"""Worker processes: what they are told, how they start, work and stop, and how one is said to have died.

`main` and `task_queue` run in a worker, and the zygote of `children` in a process of its own; the rest runs
in the consumer.
"""
