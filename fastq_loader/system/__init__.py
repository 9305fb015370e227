"""Services of the operating system and the interpreter that not every one of them has.

Runs in every process; imports nothing of this package.
"""
