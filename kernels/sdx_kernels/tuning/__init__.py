"""Launch configurations and dispatch preferences as frozen data, each number with its source."""
