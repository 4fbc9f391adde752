"""What specifications of several families share: fields, their checks, FLOPs. Nothing here needs torch."""
