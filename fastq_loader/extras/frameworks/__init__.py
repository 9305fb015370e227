"""Adapters that make frameworks keep our loader class: one module per framework, active once imported. They
run in the consumer."""
