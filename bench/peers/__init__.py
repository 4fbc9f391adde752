"""Others that trade recomputation for bytes, through their own libraries, beside `ac=budget`."""
