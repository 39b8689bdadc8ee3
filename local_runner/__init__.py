"""One machine: known pairs, engines that decode with and without DSpark, and the race between the two."""
