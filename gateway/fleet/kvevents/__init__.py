"""KV events: what vLLM servers publish over ZMQ of the blocks in their caches (``--kv-events-config``)."""
