"""Who loads which batch and which one is handed out next, as state machines without any input or output.

Pure, so it runs anywhere; in the product it runs in the consumer.
"""
