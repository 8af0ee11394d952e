"""Counting: tokenizers, chat templates, backend-side counting and calibration."""

import os

# transformers says at import that it found no PyTorch. Tokenizers and templates need none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
