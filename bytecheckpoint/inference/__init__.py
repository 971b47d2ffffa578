"""Into an inference engine: which part of which stored tensor each of its ranks wants, and how it gets there."""
