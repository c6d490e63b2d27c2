"""Keras 3 models on any engine: their names, their files, their way to the workers. Imports neither torch nor
TensorFlow.

Nothing here imports keras before the user's script does, because keras fixes its engine when it is imported.
"""
