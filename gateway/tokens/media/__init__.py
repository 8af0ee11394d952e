"""Media in chat messages: how large an item is, from its header, and how many tokens the model makes of it.

``headers`` and ``sounds`` read sizes from the first bytes of a file, ``data_urls`` reaches those bytes inside a base64
text without decoding the rest, ``families`` finds the formula for a model's architecture; each family of models has a
module of its own with pure functions. ``prompt`` puts placeholders into messages and adds up the tokens.
"""
