"""Workers on other machines. For each there is a process here, its proxy: a worker for the consumer.

`ray_workers`, `proxy_pool` and `ray_placement` run in the consumer; `proxy` in a process of its own, without
torch; `host_process` in an actor on the other machine, `host` and `far_worker` beside it; `connection` on
both sides.
"""
