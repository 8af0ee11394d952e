"""A vLLM stand-in: an engine with V1 scheduling on a real or virtual clock, and the HTTP server around it."""
