"""From stored bytes to tensors: ranged, checked, and passed on among ranks that want the same."""
