"""Communication between the processes: messages, sockets, and the table of claims.

Both sides run it.
"""
