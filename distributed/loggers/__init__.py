"""Where the course of a run is shown and written."""
