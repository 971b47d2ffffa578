"""From staging memory to durable files, and to the commit of a checkpoint."""
