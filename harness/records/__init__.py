"""Records of trials on disk: what they hold, how ranks are merged, what the verdict is. No torch."""
