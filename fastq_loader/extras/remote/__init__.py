"""Workers on other machines. Each has a local process, its proxy, which is a worker to the consumer.

`ray_workers`, `proxy_pool` and `ray_placement` run in the consumer; `proxy` in a process of its own;
`far_worker` in an actor of Ray on the other machine; `connection` on both sides.
"""
