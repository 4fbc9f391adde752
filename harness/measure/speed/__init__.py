"""Step times, and the peak rates of devices."""
