"""Circle packing: n circles in the unit square with the largest sum of radii. The worked problem of discovery."""
