"""Making a draft for a target: text from the target, training on it, and the statistics that judge the result."""
