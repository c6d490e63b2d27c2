"""Many trials of one training: what is searched, who proposes values, and what is kept of it. A single value is found by `finders`."""
