"""Wire dialects: one file each; a body becomes an ``Ask``, an outcome becomes that dialect's words."""
