"""Decides which worker loads which batch, and which batch is delivered next: state machines without any I/O.

Pure, so it runs anywhere; in the product it runs in the consumer.
"""
