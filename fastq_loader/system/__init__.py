"""What the operating system and the interpreter offer, where not every one of them does.

Runs in every process; imports nothing of this package.
"""
