"""Read the files of ``torch.save``: what they contain, and where the bytes of the tensors are."""
