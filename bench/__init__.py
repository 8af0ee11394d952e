"""Measurements that can be repeated: ``python -m bench.relay`` and what it is made of."""
