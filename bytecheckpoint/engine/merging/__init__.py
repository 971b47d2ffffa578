"""The merge stage: fragments of tensors travel to one owner, which writes them whole."""
