"""Repairs: requests that vLLM would refuse for their form, put into the form it takes. docs/repairs.md lists them.

Each is a small named rule, a pure function of the document and of what is known of the model. A rule touches only what
would be refused: each was tried against vLLM 0.32, and what that takes is left as it is.
"""
