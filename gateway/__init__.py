"""kvgate: an OpenAI-compatible gateway that knows vLLM's context windows and KV caches."""

__version__ = "0.1.0"
