"""From tensors to staging memory: one copy, in the layout of the files to be."""
