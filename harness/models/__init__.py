"""Model families: frozen specifications that build plain modules."""
