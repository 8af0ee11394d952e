"""Placing on real vLLM servers: no gateway, vLLM's own router and this gateway with the same conversations."""
