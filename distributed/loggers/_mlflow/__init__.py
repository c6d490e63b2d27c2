"""The parts of the MLflow logger. No module here imports MLflow before a run that logs to MLflow starts."""
