"""The laws, and the exact minimiser of their Huber objective."""
