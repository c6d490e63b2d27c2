"""The engine that runs a search plan on Ray Tune. Only this package imports Ray Tune."""
