"""The engine that runs a sweep plan on Ray Tune. Only this package imports Ray Tune."""
