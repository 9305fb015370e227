"""Communication between the processes: messages, sockets, and the table of claims.

Runs in the consumer and in the workers.
"""
