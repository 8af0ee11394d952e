"""A vLLM stand-in: an engine with V1 scheduling on a real or virtual clock, and the HTTP server around it."""

import os

# transformers says at import that it found no PyTorch. Tokenizers and templates need none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
