"""Workers on other machines. For each there is a process here, its stand-in: a worker for the consumer.

`wire` and `link` run on both sides; `backend` and `places` in the consumer; `stand_in` in a process of its
own, without torch; `host` and `far_worker` on the other machine.
"""
