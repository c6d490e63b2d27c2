"""The parts of the MLflow logger. Nothing here imports MLflow before a run that logs to it starts."""
