"""The chunk variants: one module a variant, found by module name."""
