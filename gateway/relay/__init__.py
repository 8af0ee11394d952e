"""The data path: one upstream client, streaming, retries before the first byte, abort, release."""
