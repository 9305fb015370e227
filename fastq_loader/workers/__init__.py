"""Worker processes: setup, start, work loop, shutdown, and death reports.

`main`, `reader` and `task_queue` run in a worker, and the process that `zygote` starts runs beside the
consumer; the rest runs in the consumer, except for a few functions of `children` and `payload`.
"""
